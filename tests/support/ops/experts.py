"""Operators of the family experts: valid arguments, results in float64, and invalid arguments."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from support import oracles_experts
from support.ops import wrong
from support.ops.combine import invalid_tail
from support.ops.norms import input_rows
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import Expected, estimated
from torch_moe_mps.ops._sample import E, H, I, T
from torch_moe_mps.ops._samples import packet

# Options that depend on each other: draw__moe_experts gives all that is no required tensor.
WHOLE = ("_moe_experts", "moe_experts")
OF_SHARED = "shared_gate", "shared_out"


def norm_of_input(d, width: int) -> dict[str, Any]:
    numbers = {name: d.number(name) for name in ("norm_eps", "norm_weight_offset")}
    return {"norm_weight": d.maybe(lambda: d.values(width)), **numbers}


def layer_of_experts(d, sizes: tuple[int, ...]) -> tuple[tuple, dict[str, Any], dict[str, Any]]:
    """(T, K, E, H, I), the arguments around the weights, and options."""
    tokens, slots = d.one(1, 2, 3, 5, 9, 33, 40, 70, 0), d.one(1, 2, 3, 8)
    shape = (tokens, slots, d.one(4, 1, 7, 17), d.one(*sizes), d.one(*sizes))
    dtype = d.dtype()
    around = {
        "x": d.values(tokens, shape[3], dtype=dtype),
        "topk_ids": d.ids(tokens, slots, experts=shape[2]),
        "topk_weights": d.values(tokens, slots),
    }
    return shape, around, d.options_of_experts(shape, dtype)


def draw_expert_mm(d):
    (tokens, slots, experts, hidden, rows), around, _ = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, transposed = around["x"].dtype, d.flag()
    matrix = (hidden, rows) if transposed else (rows, hidden)
    return {
        "x": d.values(tokens, slots, hidden, dtype=dtype) if d.flag() else around["x"],
        "weight": d.values(experts, *matrix, dtype=dtype, scale=hidden**-0.5),
        "topk_ids": around["topk_ids"],
        "bias": d.maybe(lambda: d.values(experts, rows)),
        "transposed": transposed,
    }


def draw__expert_outer(d):
    (tokens, slots, experts, left, right), around, _ = layer_of_experts(d, (32, 7, 1, 100, 65))
    dtype = around["x"].dtype
    shape = (tokens, slots, right) if d.flag() else (tokens, right)
    return {
        "dy": d.values(tokens, slots, left, dtype=dtype),
        "x": d.values(*shape, dtype=dtype),
        "topk_ids": around["topk_ids"],
        "num_experts": experts,
    }


def draw__moe_experts(d):
    (_, _, experts, hidden, inner), around, options = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, transposed = around["x"].dtype, d.flag()
    rows = 2 * inner if options["gated"] else inner
    gate_up, down = (hidden, rows) if transposed else (rows, hidden), (inner, hidden)
    return {
        **around,
        "gate_up": d.values(experts, *gate_up, dtype=dtype, scale=hidden**-0.5),
        "down": d.values(experts, *(down if transposed else down[::-1]), dtype=dtype, scale=inner**-0.5),
        "transposed": transposed,
        **options,
        **norm_of_input(d, hidden),
        **identity(d, options),
    }


def identity(d, options: dict[str, Any]) -> dict[str, Any]:
    """Whether ids beyond the experts give their input, instead of a shared expert."""
    has_identity = d.flag()
    without = {**dict.fromkeys(OF_SHARED), "gate_is_logit": False} if has_identity else {}
    return {"has_identity": has_identity, **without}


def part_of(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a private operator's call that the public one of its name has."""
    names = [each.name for each in packet(name).default._schema.arguments]
    return {name: call[name] for name in names if name in call}


def as_private(name: str, a) -> SimpleNamespace:
    """A public operator's call as one of the private operator, with the rest absent."""
    arguments = packet(f"_{name}").default._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return SimpleNamespace(**defaults | vars(a))


def draw_moe_experts(d):
    return part_of("moe_experts", draw__moe_experts(d))


EXPERT_OPTIONS = (
    *("gate_up_bias", "down_bias", "activation", "alpha", "limit", "gated", "interleaved"),
    *("shared_gate", "shared_out", "residual", "gate_is_logit"),
    *("has_identity", "weights_on_inputs"),
)


def experts(a, gate_up: np.ndarray, down: np.ndarray, rounded_weight: bool) -> list[Expected]:
    options = {name: getattr(a, name, None) for name in EXPERT_OPTIONS}
    return [
        estimated(
            oracles_experts.moe_experts_of_rows(
                a.x.dtype,
                input_rows(a),
                gate_up,
                down,
                a.topk_ids,
                a.topk_weights,
                options,
                rounded_weight=rounded_weight,
            )
        )
    ]


def expected_expert_mm(a):
    weight = exact(a.weight).swapaxes(1, 2) if a.transposed else exact(a.weight)
    return [estimated(oracles_experts.expert_mm(a.x, weight, a.topk_ids, a.bias))]


def expected__expert_outer(a):
    left, right = exact(a.dy), exact(a.x)
    value = np.zeros((a.num_experts, left.shape[2], right.shape[-1]))
    size = np.zeros_like(value)
    for e, t, k in oracles_experts.pairs_by_expert(a.topk_ids, a.num_experts):
        of_right = right[t, k] if right.ndim == 3 else right[t]
        value[e] = left[t, k].T @ of_right
        size[e] = abs(left[t, k]).T @ abs(of_right)
    return [Expected(value, (8 + a.topk_ids.numel()) * FLOAT32_EPS * size)]


OF_TOKENS = ("x", "topk_ids", "topk_weights", "logits", "shared_out", "residual")


def in_rows(a) -> SimpleNamespace:
    """Arguments of a layer with [..., H] as rows [T, H]."""
    flat = {name: getattr(a, name, None) for name in OF_TOKENS}
    made = {
        name: value.reshape(value.shape[:-1].numel(), value.shape[-1])
        for name, value in flat.items()
        if isinstance(value, Tensor)
    }
    if a.shared_gate is not None:
        made["shared_gate"] = a.shared_gate.reshape(-1)
    return SimpleNamespace(**vars(a) | made)


def in_shape(results: list[Expected], shape) -> list[Expected]:
    """Results of rows, with the leading dimensions of x."""

    def shaped(part):
        return part.reshape(*shape[:-1], part.shape[-1]) if np.ndim(part) == 2 else part

    return [Expected(*map(shaped, result)) for result in results]


def expected__moe_experts(a):
    shape, a = a.x.shape, in_rows(a)
    gate_up, down = exact(a.gate_up), exact(a.down)
    if a.transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    return in_shape(experts(a, gate_up, down, rounded_weight=False), shape)


def expected_moe_experts(a):
    return expected__moe_experts(as_private("moe_experts", a))


def invalid_around(zeros):
    return [
        wrong("of shape [E, 2I] = (8, 64)", gate_up_bias=zeros(E, I)),
        wrong("limit must be a number for activation silu_clamped, got None", activation="silu_clamped"),
    ]


def invalid_expert_mm(zeros):
    return [
        wrong("weight must be of shape [E, H, N] with H = 64 as in x, got (8, 32, 64)", transposed=True),
        wrong("of shape [E, N] = (8, 32)", bias=zeros(E, H)),
    ]


def invalid_moe_experts(zeros):
    return [
        wrong("of shape [E, I, H] with H = 64 as in x", gate_up=zeros(E, 2 * I, H + 1), gated=False),
        wrong(
            "down must be of shape [E, I, H] = (8, 32, 64), got (8, 64, 32)",
            gate_up=zeros(E, H, 2 * I),
            transposed=True,
        ),
        *invalid_around(zeros),
        wrong("True for activation swiglu_oai", gated=False, activation="swiglu_oai"),
        wrong("at least 0.0", limit=-1.0, activation="silu_clamped"),
        wrong("None for activation silu", limit=7.0),
        wrong("None for activation silu", alpha=1.0),
        wrong("a finite number", alpha=float("inf"), activation="swiglu_oai"),
        wrong("False when gated is False", interleaved=True, gated=False),
    ]


def invalid__moe_experts(zeros):
    beside = wrong("shared_out must be None beside has_identity", shared_out=zeros(T, H), has_identity=True)
    return [*invalid_moe_experts(zeros), *invalid_tail(zeros), beside]


def invalid__expert_outer(zeros):
    return [wrong("between 1 and 1024", num_experts=number) for number in (0, 1025)]
