"""Operators of the family norms: valid arguments, results in float64, and invalid arguments."""

from typing import Any

import numpy as np
from torch import Tensor

from support import oracles
from support.ops import wrong
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import Estimate, roundoff
from support.oracles_operators import Expected, given
from torch_moe_mps.ops._sample import H


def draw_rows(d) -> Tensor:
    return d.values(*d.leading(), d.width(), scale=d.one(1.0, 1e-3, 30.0))


def draw_norm(d, *weights: int) -> dict[str, Any]:
    """With weights of the last dimensions, as many as one of `weights`, or without."""
    x = draw_rows(d)
    sizes = [x.shape[-count:] for count in weights if count <= x.dim()]
    without = {"norm_weight": None, "norm_weight_offset": 0.0}
    return {"x": x, **(without if d.flag() else {"norm_weight": d.values(*d.one(*sizes))})}


def draw_rms_norm(d):
    return draw_norm(d, 1, 2)


def draw_layer_norm(d):
    return draw_norm(d, 1)


def draw_rms_norm_gated(d):
    x = draw_rows(d)
    width = x.shape[-1]
    groups = [n for n in (1, width // 2, width) if n and width % n == 0]
    return {"x": x, "group_size": d.one(None, *groups)}


def draw_fused_norm_add(d):
    return {"residual": draw_rows(d)}


def draw_fused_norm_add_scalar(d):
    residual = draw_rows(d)
    return {"residual": residual, "scalar": d.values(*d.one((1,), residual.shape[-1:], ()))}


draw_fused_residual_norm = draw_fused_norm_add
draw_fused_residual_norm_scalar = draw_fused_norm_add_scalar


def draw_fused_residual_layer_norm(d):
    residual = draw_rows(d)
    without = {"norm_weight": None, "norm_weight_offset": 0.0}
    return {"residual": residual, **(without if d.flag() else {"norm_weight": d.values(residual.shape[-1])})}


def normed(x, weight, eps, offset=0.0, factor=1.0, *, x_error=0.0) -> Expected:
    """rms(x) * (weight + offset) * factor; `x_error` is that of x."""
    if x.shape[-1] == 0:
        return Expected(np.zeros(x.shape), np.zeros(x.shape))
    weight = np.ones(x.shape[-1]) if weight is None else weight
    relative = 12 * FLOAT32_EPS
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    error = abs(x) * scale * (abs(weight) + abs(offset)) * abs(factor) * relative
    error = error + 2 * x_error * scale * abs(weight + offset) * abs(factor)
    return Expected(x * scale * (weight + offset) * factor, error)


def norm_add(a, factor=1.0) -> list[Expected]:
    residual = exact(a.residual)
    norm = normed(exact(a.x), exact(a.norm_weight), a.norm_eps, a.norm_weight_offset)
    error = norm.error + 4 * FLOAT32_EPS * (abs(residual) + abs(norm.value))
    return [Expected((residual + norm.value) * factor, error * abs(factor))]


def residual_norm(a, of_input=1.0, factor=1.0) -> tuple[Expected, Expected]:
    """Without a factor of the input the sum is exact: 24 bits of float32 are twice float16's 11 and two more.

    With one it may be rounded to the neighbour of the nearest number.
    """
    residual, product = exact(a.residual), exact(a.x) * of_input
    total, error = oracles.round_to(residual + product, a.residual.dtype), None
    if of_input != 1.0:
        error = 2 * FLOAT32_EPS * (abs(residual) + abs(product))
    off = 0.0 if error is None else oracles.spacing(total, a.residual.dtype) + error
    return normed(
        total, exact(a.norm_weight), a.norm_eps, a.norm_weight_offset, factor, x_error=off
    ), Expected(total, error)


def expected_rms_norm(a):
    return [normed(exact(a.x), given(a.norm_weight), a.norm_eps, a.norm_weight_offset, a.factor)]


def expected_layer_norm(a):
    return [layer_normed(exact(a.x), a)]


def layer_normed(x: np.ndarray, a) -> Expected:
    if x.size == 0:
        return Expected(x)
    size = abs(x).max(-1, keepdims=True)
    norm = normed(x - x.mean(-1, keepdims=True), given(a.norm_weight), a.norm_eps, a.norm_weight_offset)
    spread = 1 / np.sqrt(x.var(-1, keepdims=True) + a.norm_eps)
    weight = 1.0 if a.norm_weight is None else abs(exact(a.norm_weight)) + a.norm_weight_offset
    bias = 0.0 if a.bias is None else exact(a.bias)
    # The mean is off by what float32 loses of the largest number; that of x^2 is of its square.
    error = norm.error + 4 * FLOAT32_EPS * (size * spread * weight + abs(norm.value) * size * spread)
    return Expected(norm.value + bias, error + 2 * FLOAT32_EPS * abs(bias))


def normed_and_gated(x, gate, weight, eps, offset, activation="silu", x_error=0.0) -> Expected:
    factor = oracles.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    norm = normed(x, weight, eps, offset, factor, x_error=x_error)
    return Expected(norm.value, norm.error + 2 * abs(gate) * FLOAT32_EPS * abs(norm.value) + 1e-35)


def expected_rms_norm_gated(a):
    shape, width = a.x.shape, a.group_size or max(1, a.x.shape[-1])
    groups = shape[-1] // width, width
    x, gate, weight = (exact(t).reshape(*t.shape[:-1], *groups) for t in (a.x, a.gate, a.norm_weight))
    if a.gate_first:
        factor = oracles.sigmoid(gate) * (gate if a.activation == "silu" else 1.0)
        # From a gate of -88 on the sigmoid is 0.
        error = 4 * (1 + abs(gate)) * FLOAT32_EPS * abs(x * factor) + 1e-36 * abs(x)
        result = normed(x * factor, weight, a.norm_eps, a.norm_weight_offset, x_error=error)
    else:
        result = normed_and_gated(x, gate, weight, a.norm_eps, a.norm_weight_offset, a.activation)
    error = result.error + 1e-35  # the GPU has no smaller numbers
    return [Expected(result.value.reshape(shape), error.reshape(shape))]


def expected_fused_norm_add(a):
    return norm_add(a)


def expected_fused_norm_add_scalar(a):
    return norm_add(a, exact(a.scalar))


def expected_fused_residual_norm(a):
    return [*residual_norm(a, a.factor)]


def expected_fused_residual_layer_norm(a):
    """The sum is exact, as in `residual_norm`."""
    total = oracles.round_to(exact(a.residual) + exact(a.x), a.residual.dtype)
    return [layer_normed(total, a), Expected(total)]


def expected_fused_residual_norm_scalar(a):
    return [residual_norm(a, factor=exact(a.scalar))[0]]


def input_rows(a) -> Estimate:
    """The rows of x, or their norm: rounded to the dtype of x or not."""
    x = exact(a.x)
    if a.norm_weight is None:
        return Estimate(x, np.zeros_like(x))
    norm = normed(x, exact(a.norm_weight), a.norm_eps, a.norm_weight_offset)
    return Estimate(norm.value, norm.error + roundoff(a.x.dtype) * abs(norm.value))


def invalid_rms_norm(zeros):
    return [
        wrong("0.0 without a weight", norm_weight_offset=1.0, norm_weight=None),
        wrong(
            "norm_weight must be of shape [N, H] of the input = (3, 64), got (4, 64)", norm_weight=zeros(4, H)
        ),
    ]


def invalid_layer_norm(zeros):
    return [wrong("0.0 without a weight", norm_weight_offset=1.0, norm_weight=None)]


def invalid_fused_residual_layer_norm(zeros):
    return [wrong("0.0 without a weight", norm_weight_offset=1.0, norm_weight=None)]


def invalid_rms_norm_gated(zeros):
    return [
        wrong("a divisor of the 64 columns, got 48", group_size=48),
        wrong("a divisor of the 64 columns, got 0", group_size=0),
    ]
