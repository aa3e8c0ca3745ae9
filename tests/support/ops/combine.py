"""Operators of the family combine: valid arguments, results in float64, and invalid arguments."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from support import oracles
from support.ops import wrong
from support.ops.norms import normed
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import Estimate, activate
from support.oracles_operators import Expected, estimated, given
from torch_moe_mps.ops._sample import H, T


def draw_silu_mul_stacked(d):
    return {"gate": d.values(*d.leading(), d.width(), scale=d.one(1.0, 8.0))}


def draw_expert_activation(d):
    options, width = {"alpha": None, "limit": None, **d.activation()}, d.width()
    options["gated"] = options["activation"] in ("swiglu_oai", "silu_clamped", "silu_capped") or d.flag()
    options["interleaved"] = options["gated"] and d.flag()
    return {"x": d.values(*d.leading(), 2 * width if options["gated"] else width), **options}


def draw__expert_activation_backward(d):
    given = draw_expert_activation(d)
    rows = given["x"]
    width = rows.shape[-1] // 2 if given["gated"] else rows.shape[-1]
    return {"dy": d.values(*rows.shape[:-1], width, dtype=rows.dtype), **given}


def draw__moe_weighted_reduce_backward(d):
    given = draw_moe_weighted_reduce(d)
    slots, weights = given["expert_out"], given["topk_weights"]
    return {"expert_out": slots, "topk_weights": weights}


def draw_weighted_sum_stacked(d):
    return {"expert_out": d.values(*d.leading(), d.one(1, 2, 3, 8, 11), d.width())}


draw_weighted_sum_residual_stacked_ = draw_weighted_sum_residual_norm_stacked_ = draw_weighted_sum_stacked


def draw_moe_weighted_reduce(d):
    tokens, top_k, width, dtype = d.count(), d.one(1, 2, 8, 10), d.width(), d.dtype()
    shape = (tokens, top_k, width) if d.flag() else (tokens * top_k, width)
    shared_out = d.maybe(lambda: d.values(tokens, width, dtype=dtype))
    shared_gate = None if shared_out is None else d.maybe(lambda: d.values(*d.one((tokens,), (tokens, 1))))
    return {
        "topk_weights": d.values(tokens, top_k),
        "expert_out": d.values(*shape, dtype=dtype),
        "shared_gate": shared_gate,
        "shared_out": shared_out,
        "residual": d.maybe(lambda: d.values(tokens, width, dtype=dtype)),
        "gate_is_logit": shared_gate is not None and d.flag(),
    }


def summed(terms: np.ndarray, magnitude: np.ndarray, count: int) -> Expected:
    return Expected(terms, (4 + count) * FLOAT32_EPS * magnitude)


def weighted(slots, weights, residual=0.0) -> Expected:
    value = residual + oracles.weighted_sum(slots, weights)
    magnitude = abs(residual) + oracles.weighted_sum(abs(slots), abs(weights))
    return summed(value, magnitude, slots.shape[-2])


def expected_silu_mul_stacked(a):
    gate, up = exact(a.gate), exact(a.up)
    value = oracles.silu_mul(gate, up)
    return [Expected(value, (8 + abs(gate) / 4) * FLOAT32_EPS * abs(value) + 1e-37)]


def expected_expert_activation(a):
    rows = exact(a.x).reshape(-1, a.x.shape[-1]) if a.x.numel() else exact(a.x)
    if a.x.numel() == 0:
        return [Expected(np.zeros((*rows.shape[:-1], rows.shape[-1] // (1 + a.gated))))]
    out = activate(Estimate(rows, np.zeros_like(rows)), vars(a), a.x.dtype)
    return [estimated(Estimate(*(part.reshape(*a.x.shape[:-1], -1) for part in out)))]


def clamped(x: Tensor, high: float, low: float = -math.inf) -> Tensor:
    """torch.clamp, with a gradient of 1 at both limits: since torch 2.15 its own is 0 there."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def expected__expert_activation_backward(a):
    """By torch's own derivatives, in float64."""
    rows, dy = a.x.double().requires_grad_(), a.dy.double()
    functions = {
        **{"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": lambda x: F.relu(x) ** 2},
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    gate, up = rows, torch.ones_like(rows)
    if a.gated:
        gate, up = (rows[..., 0::2], rows[..., 1::2]) if a.interleaved else rows.chunk(2, -1)
    if a.activation in functions:
        out = functions[a.activation](gate) * up
    else:
        limit, alpha = 7.0 if a.limit is None else a.limit, 1.702 if a.alpha is None else a.alpha
        up, is_capped = clamped(up, limit, -limit), a.activation == "silu_capped"
        gate = gate if is_capped else clamped(gate, limit)
        if a.activation == "swiglu_oai":
            out = (up + 1) * gate * torch.sigmoid(alpha * gate)
        else:
            out = (clamped(F.silu(gate), limit) if is_capped else F.silu(gate)) * up
    (value,) = torch.autograd.grad(out, rows, dy)
    sizes = [(1 + part.detach().abs()) for part in (gate, up)]
    size = dy.abs() * sizes[0] ** 2 * sizes[1]
    if a.gated:
        both = (size, size)
        size = torch.stack(both, -1).flatten(-2) if a.interleaved else torch.cat(both, -1)
    return [Expected(value.numpy(), 16 * FLOAT32_EPS * size.numpy())]


def expected__moe_weighted_reduce_backward(a):
    dy, weights = exact(a.dy)[:, None], exact(a.topk_weights)
    slots = exact(a.expert_out).reshape(*weights.shape, dy.shape[-1])
    error = (8 + dy.shape[-1]) * FLOAT32_EPS * (abs(slots) * abs(dy)).sum(-1)
    of_slots = (weights[..., None] * dy).reshape(a.expert_out.shape)
    return [Expected(of_slots, 2 * FLOAT32_EPS * abs(of_slots)), Expected((slots * dy).sum(-1), error)]


def expected_weighted_sum_stacked(a):
    return [weighted(exact(a.expert_out), exact(a.topk_weights))]


def expected_weighted_sum_residual_stacked_(a):
    return [weighted(exact(a.expert_out), exact(a.topk_weights), exact(a.residual_))]


def expected_weighted_sum_residual_norm_stacked_(a):
    total = weighted(exact(a.expert_out), exact(a.topk_weights), exact(a.residual_))
    dtype = a.residual_.dtype
    error = total.error + oracles.spacing(total.value, dtype)
    rounded = oracles.round_to(total.value, dtype)
    return [normed(rounded, exact(a.norm_weight), a.norm_eps, x_error=error), total]


def expected_moe_weighted_reduce(a):
    arguments = [given(x) for x in (a.topk_weights, a.expert_out, a.shared_gate, a.shared_out, a.residual)]
    value = oracles.weighted_reduce(*arguments, a.gate_is_logit)
    sizes = [None if x is None else abs(x) for x in arguments]
    if a.gate_is_logit:
        sizes[2] = oracles.sigmoid(arguments[2]) * (1 + abs(arguments[2]))
    return [summed(value, oracles.weighted_reduce(*sizes), a.topk_weights.shape[1])]


def invalid_tail(zeros):
    return [
        wrong("shared_out must be given when shared_gate is, got None", shared_gate=zeros(T)),
        wrong("T = 3 rows of H = 64 elements", residual=zeros(1, H, T)),
        wrong("False without shared_gate", gate_is_logit=True, shared_out=zeros(T, H)),
    ]


def invalid_expert_activation(zeros):
    return [
        wrong("x must be of an even number of columns, gates and ups", x=zeros(T, 3)),
        *(
            wrong(f"limit must be a number for activation {name}, got None", activation=name)
            for name in ("silu_clamped", "silu_capped")
        ),
    ]


def invalid__expert_activation_backward(zeros):
    return [
        wrong("dy must be of shape [..., I] = (3, 2, 32), got (3, 2, 33)", dy=zeros(T, 2, 33)),
    ]


def invalid_moe_weighted_reduce(zeros):
    return [*invalid_tail(zeros)]
