"""Operators of the family quantize: valid arguments, results in float64, and invalid arguments."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from support import oracles_experts
from support.ops import wrong
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import dequantise, group_of
from support.oracles_operators import Expected
from torch_moe_mps.quantization import Format
from torch_moe_mps.quantization.formats import quantize_stack


def draw__quantize_by_importance(d):
    to, experts, rows = d.weighed_format(), d.one(2, 1, 0, 5), d.one(3, 1, 0, 17)
    columns = d.one(2, 1, 0, 5) * group_of(to)
    weight = d.values(experts, rows, columns, scale=d.one(1.0, 1e-3, 30.0))
    importance = d.values(experts, columns, dtype=torch.float32).mul(d.one(1.0, 0.0, 4.0)).square()
    if d.flag() and weight.numel():
        weight[:, 0], importance[0, 0] = d.one(0.0, -0.3, 1.5), 0.0
    return {"weight": weight, "importance": importance, "format": to}


def weighted_errors(weight: Tensor, quantized: Sequence[Tensor | None], importance: Tensor, format: str):
    """Of each group, in float64: sum importance * (weight - dequantised)^2."""
    difference = dequantise(*quantized, format) - exact(weight)
    return group_sums(exact(importance)[..., None, :] * difference**2, format)


def group_sums(values: np.ndarray, format: str) -> np.ndarray:
    group = oracles_experts.numbers_of(format)[1]
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group).sum(-1)


def expected__quantize_by_importance(a):
    """Any codes and scales whose error is not over that of MLX's rule."""
    packed, scales, zeros, _ = a.results
    found = packed, scales, zeros
    format = Format(*oracles_experts.numbers_of(a.format))
    plain = quantize_stack(a.weight, format) if a.weight.numel() else found
    ours, theirs = (weighted_errors(a.weight, each, a.importance, a.format) for each in (found, plain))
    weight, decoded = exact(a.weight), dequantise(*found, a.format)
    rounding = group_sums(1e-6 * exact(a.importance)[:, None] * weight**2, a.format)
    wrong = ~((ours <= 1.00001 * theirs + rounding) | ~np.isfinite(theirs))
    sums = [group_sums(abs(each), a.format) for each in (weight - decoded, weight)]
    error = 64 * FLOAT32_EPS * group_sums(abs(weight) + abs(decoded), a.format)
    words = packed.shape[-1] // max(1, wrong.shape[-1])
    return [
        Expected(packed.numpy() ^ np.repeat(wrong, words, -1)),
        *(Expected(exact(each)) for each in (scales, zeros)),
        Expected(np.stack(sums, -1), error[..., None]),
    ]


def invalid__quantize_by_importance(zeros):
    return [
        wrong(
            "C, the last dimension of weight, must be a multiple of 32, got 40",
            weight=zeros(2, 5, 40),
            importance=zeros(2, 40),
        ),
    ]
