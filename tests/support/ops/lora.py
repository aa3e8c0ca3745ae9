"""Operators of the family lora: valid arguments, results in float64, and invalid arguments."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from support import oracles_experts
from support.ops import wrong
from support.ops.experts import layer_of_experts
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import roundoff
from support.oracles_operators import Expected
from torch_moe_mps.ops._sample import H, I
from torch_moe_mps.ops._samples import packet


def draw_factors(d, experts: int, hidden: int, rows: int) -> dict[str, Tensor]:
    """Those of an adapter, of products of about 1."""
    rank, dtype = d.one(1, 3, 4, 9), d.dtype()
    return {
        "a": d.values(rank * experts, hidden, dtype=dtype, scale=max(1, hidden) ** -0.5),
        "b": d.values(rows, rank * experts, dtype=dtype, scale=rank**-0.5),
        "scaling": d.one(1.0, -0.25, 2.0),
    }


def draw_linear_lora(d):
    leading, hidden, rows, dtype = d.leading(), d.width(), d.width(), d.dtype()
    around = {"added": d.values(*leading, rows, dtype=dtype), "x": d.values(*leading, hidden, dtype=dtype)}
    return {**around, **draw_factors(d, 1, hidden, rows)}


def draw_expert_lora(d):
    (tokens, slots, experts, hidden, rows), around, _ = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, ids = around["x"].dtype, around["topk_ids"]
    listed = zip(("pair_order", "offsets"), packet("moe_bucket")(ids, num_experts=experts), strict=True)
    return {
        "added": d.values(tokens, slots, rows, dtype=dtype),
        "x": d.values(tokens, slots, hidden, dtype=dtype) if d.flag() else around["x"],
        **draw_factors(d, experts, hidden, rows),
        "topk_ids": ids,
        "num_experts": experts,
        **(dict(listed) if d.flag() else {"pair_order": None, "offsets": None}),
    }


def draw__expert_lora_backward(d):
    call = draw_expert_lora(d)
    listed = packet("moe_bucket")(call["topk_ids"], num_experts=call["num_experts"])
    return {"dy": call.pop("added"), **call, **dict(zip(("pair_order", "offsets"), listed, strict=True))}


def lora(a, rank: int, x: np.ndarray, of_a: np.ndarray, of_b: np.ndarray, added: np.ndarray) -> Expected:
    """added + scaling * B (A x), rounded once behind sums in float32."""
    value = added + a.scaling * ((x @ of_a.T) @ of_b.T)
    size = abs(added) + abs(a.scaling) * ((abs(x) @ abs(of_a).T) @ abs(of_b).T)
    return Expected(value, (8 + math.sqrt(x.shape[-1]) + rank) * FLOAT32_EPS * size)


def expected_linear_lora(a):
    return [lora(a, a.a.shape[0], exact(a.x), exact(a.a), exact(a.b), exact(a.added))]


def of_experts(a) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, tuple]]:
    """For each expert with pairs: its A [r, H], its B [N, r], its rows, and their numbers (e, t, k)."""
    all_a, all_b, x = exact(a.a), exact(a.b), exact(a.x)
    rank = all_a.shape[0] // a.num_experts
    for e, t, k in oracles_experts.pairs_by_expert(a.topk_ids, a.num_experts):
        rows = x[t, k] if x.ndim == 3 else x[t]
        yield all_a[e * rank : (e + 1) * rank], all_b[:, e :: a.num_experts], rows, (e, t, k)


def is_listed(a) -> bool:
    """Whether the list of pairs is that of the ids; with another one every result is right."""
    if a.pair_order is None:
        return True
    order, offsets = packet("moe_bucket")(a.topk_ids, num_experts=a.num_experts)
    return torch.equal(a.pair_order, order) and torch.equal(a.offsets, offsets)


def expected_expert_lora(a):
    value, error = exact(a.added), np.zeros(tuple(a.added.shape))
    for of_a, of_b, rows, (_, t, k) in of_experts(a):
        value[t, k], error[t, k] = lora(a, len(of_a), rows, of_a, of_b, value[t, k])[:2]
    return [Expected(value, error, is_listed(a))]


def expected__expert_lora_backward(a):
    dy, rank = exact(a.dy), a.a.shape[0] // a.num_experts
    dx, of_a, of_b = np.zeros((*dy.shape[:2], a.a.shape[1])), np.zeros(a.a.shape), np.zeros(a.b.shape)
    sizes = [np.zeros_like(each) for each in (dx, of_a, of_b)]
    for one, two, rows, (e, t, k) in of_experts(a):
        for outs, sign in (((dx, of_a, of_b), lambda x: x), (sizes, abs)):
            own, other, x, y = (sign(each) for each in (one, two, rows, dy[t, k]))
            gradient = sign(np.float64(a.scaling)) * (y @ other)
            outs[0][t, k] = gradient @ own
            outs[1][e * rank : (e + 1) * rank] = gradient.T @ x
            outs[2][:, e :: a.num_experts] = sign(np.float64(a.scaling)) * (y.T @ (x @ own.T))
    terms = 8 + math.sqrt(sum(a.a.shape) + sum(a.b.shape)) + a.topk_ids.numel()
    errors = [terms * FLOAT32_EPS * size for size in sizes]
    if a.x.ndim == 2:  # a slot may be rounded before it is added
        errors[0] = errors[0].sum(1) + roundoff(a.x.dtype) * sizes[0].sum(1)
        dx = dx.sum(1)
    known = is_listed(a)
    of_b, errors[2] = of_b.T, errors[2].T
    return [Expected(*each, known) for each in zip((dx, of_a, of_b), errors, strict=True)]


def invalid_linear_lora(zeros):
    return [
        wrong("a finite number", scaling=float("inf")),
        wrong(
            "a must be of r E rows, with E = 1 and r between 1 and 256, got (257, 64)",
            a=zeros(257, H),
            b=zeros(I, 257),
        ),
        wrong("b must be of shape [N, r E] with r E = 3 rows as in a, got (32, 4)", b=zeros(I, 4)),
    ]


def invalid_expert_lora(zeros):
    return [
        wrong("a finite number", scaling=float("inf")),
        wrong(
            "a must be of r E rows, with E = 8 and r between 1 and 256, got (25, 64)",
            a=zeros(25, H),
            b=zeros(I, 25),
        ),
        wrong("between 1 and 1024", num_experts=0),
    ]


def invalid__expert_lora_backward(zeros):
    return [
        wrong("a finite number", scaling=float("inf")),
        wrong("offsets must be of shape [E + 1] = (9,), got (8,)", offsets=torch.zeros(8, dtype=torch.int32)),
    ]
