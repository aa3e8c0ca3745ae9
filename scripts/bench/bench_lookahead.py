#!/usr/bin/env python
"""How many of the next layer's experts its router names one layer early, on a Mixture of Experts of Qwen3.

    python scripts/bench/bench_lookahead.py build/moe/model build/moe/held.bin

The router of the next layer is run on the input of this layer's experts. What matters for experts on the SSD
are those that are not in memory: each layer keeps the most recently used ones. A row is a number of slots. It
has the share of hits, the share of the chosen experts that are named, the same of the missing ones, and how
many experts are read in vain for each missing one. Texts are tokens as uint16, as scripts/bench/train_moe.py
writes them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

LENGTH, TEXTS = 128, 24
WARM = 4  # texts before the first one that counts


@torch.no_grad()
def routed(model: Any, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Experts [texts, tokens, k] that each layer but the first chooses, and those that are named early."""
    inputs, hooks, layers = list[Tensor](), [], model.model.layers
    for layer in layers:
        hooks.append(layer.mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0])))
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    chosen = model.config.num_experts_per_tok
    pairs = zip(layers[1:], inputs[1:], inputs, strict=False)
    both = [
        [(x @ layer.mlp.gate.weight.T).topk(chosen).indices for x in of_layer] for layer, *of_layer in pairs
    ]
    return [each[0] for each in both], [each[1] for each in both]


def shares(
    chosen: Sequence[Tensor], named: Sequence[Tensor], slots: int
) -> tuple[float, float, float, float]:
    """Hits, named ones of all and of the missing experts, and reads in vain for each missing one."""
    asked = hits = found = found_missing = in_vain = 0
    for of_layer, early in zip(chosen, named, strict=True):
        held: list[int] = []  # least recently used first
        for text, pairs in enumerate(zip(of_layer.tolist(), early.tolist(), strict=True)):
            for experts, names in zip(*pairs, strict=True):
                missing = {*experts} - {*held}
                if text >= WARM:
                    asked += len(experts)
                    hits += len(experts) - len(missing)
                    found += len({*experts} & {*names})
                    found_missing += len(missing & {*names})
                    in_vain += len({*names} - {*experts} - {*held})
                held = [*(each for each in held if each not in experts), *experts][-slots:]
    misses = max(1, asked - hits)
    return hits / asked, found / asked, found_missing / misses, in_vain / misses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    options = parser.parse_args()
    model = Qwen3MoeForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokens = np.fromfile(options.texts, dtype=np.uint16, count=TEXTS * LENGTH).astype(np.int64)
    both = routed(model, torch.from_numpy(tokens).view(-1, LENGTH))
    experts = model.config.num_experts
    print("slots | hits | named | named of the missing | in vain for each missing one")
    for eighths in (3, 4, 5):
        slots = eighths * experts // 8
        print(f"{slots:5} | " + " | ".join(f"{share:.2f}" for share in shares(*both, slots)))


if __name__ == "__main__":
    main()
