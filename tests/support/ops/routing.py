"""Operators of the family routing: valid arguments, results in float64, and invalid arguments."""

import math

import numpy as np
import torch
from torch import Tensor

from support import oracles
from support.ops import wrong
from support.ops.norms import input_rows, normed
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import DEVIATIONS
from support.oracles_operators import Expected, given
from torch_moe_mps.ops._sample import E, T


def draw_logits(d, *shape: int, special: bool) -> Tensor:
    values = d.values(*shape, scale=d.one(1.0, 8.0))
    if special and d.flag():
        for value in (math.nan, math.inf, -math.inf):
            values[torch.rand(shape, generator=d.generator) < 0.05] = value
    return values


def experts_and_top_k(d) -> tuple[int, int]:
    experts = d.one(8, 1, 2, 7, 33, 64, 128, 300, 1024)
    return experts, d.one(*(k for k in (1, 2, 8, 11, 64) if k <= experts))


def draw_moe_router(d, sizes: tuple[int, int] | None = None, tokens: int | None = None):
    experts, top_k = sizes or experts_and_top_k(d)
    num_groups = d.one(1, 1, *(g for g in (2, 4, 8) if experts % g == 0 and experts // g >= 2))
    least = -(-top_k // (experts // num_groups))
    top_groups = d.between(least, num_groups)
    bias = d.maybe(lambda: d.values(experts, scale=0.1))
    masked_score = d.one(None, None, 0.0)
    plain = num_groups == 1 and bias is None and masked_score is None
    return {
        "logits": draw_logits(d, d.count() if tokens is None else tokens, experts, special=plain),
        "top_k": top_k,
        "correction_bias": bias,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "masked_score": masked_score,
        "sum_eps": d.one(1e-20, 1e-6, 0.0),
        "sum_min": d.one(0.0, 1e-3),
        "scaling_factor": d.one(1.0, 2.5),
    }


def draw_moe_router_topk_softmax(d):
    experts, top_k = experts_and_top_k(d)
    return {"logits": draw_logits(d, d.count(), experts, special=True), "top_k": top_k}


def draw_fused_moe_routing(d):
    experts, top_k = experts_and_top_k(d)
    return {"logits": draw_logits(d, *d.one((d.count(),), ()), experts, special=True), "top_k": top_k}


def draw_router_logits(d):
    tokens, width, experts = d.count(), d.width(), d.one(8, 1, 5, 33, 64, 0)
    return {"x": d.values(tokens, width), "weight": d.values(experts, width)}


def draw_moe_gate(d):
    (experts, top_k), width = experts_and_top_k(d), d.width()
    return {
        "x": d.values(d.count(), width),
        "weight": d.values(experts, width, scale=max(1, width) ** -0.5),
        "top_k": top_k,
    }


def draw_moe_bucket(d):
    experts = d.one(8, 1, 33, 1024)
    return {"topk_ids": d.ids(d.count(), d.one(1, 2, 8, 0), experts=experts), "num_experts": experts}


def draw_moe_compute_ids_tpe(d):
    rows = {name: d.one(1, 64, 65, 2**31 - 1) for name in ("gate_up_rows", "down_rows")}
    return {**draw_moe_bucket(d), **rows}


SURE = 1e-5  # of the largest choice: how far apart two choices are that float32 tells from each other


def with_leading(results: list[Expected], leading: tuple[int, ...]) -> list[Expected]:
    """Results of rows, [T, N], as [..., N]."""

    def shaped(part):
        return part.reshape(*leading, part.shape[-1]) if isinstance(part, np.ndarray) else part

    return [Expected(*map(shaped, result)) for result in results]


def routed(logits, a, **options) -> list[Expected]:
    *leading, experts = logits.shape
    return with_leading(_routed(logits.reshape(-1, experts), a, **options), tuple(leading))


def _routed(logits, a, **options) -> list[Expected]:
    if logits.shape[0] == 0:
        empty = Expected(np.zeros((0, a.top_k)))
        return [empty, empty]
    weights, ids, gaps = oracles.route(logits, a.top_k, **options)
    largest = np.abs(oracles.finite(logits)).max(-1, initial=1.0)
    bias = options.get("bias")
    largest = largest + (0.0 if bias is None else abs(bias).max())
    sure = (gaps > SURE * largest)[:, None]
    chosen = np.take_along_axis(oracles.finite(logits), ids, -1)
    error = (64 + 2 * np.minimum(abs(chosen), 200)) * FLOAT32_EPS * abs(weights)
    return [Expected(weights, error + 1e-36, sure), Expected(ids, None, sure)]


def expected_moe_router(a):
    names = (
        *("scoring", "norm_topk_prob", "num_groups", "top_groups", "group_score", "masked_score"),
        *("bias_on_logits", "sum_eps", "sum_min", "scaling_factor"),
    )
    options = {name: getattr(a, name) for name in names}
    return routed(
        exact(a.logits),
        a,
        **options,
        bias=given(a.correction_bias),
        per_expert_scale=given(a.per_expert_scale),
    )


def expected_moe_router_topk_softmax(a):
    return routed(exact(a.logits), a, scoring="softmax", norm_topk_prob=a.norm_topk_prob, sum_eps=0.0)


def expected_fused_moe_routing(a):
    return routed(
        exact(a.logits),
        a,
        scoring="softmax_after_topk",
        norm_topk_prob=False,
        per_expert_scale=exact(a.per_expert_scale),
    )


def dot_products(x: np.ndarray, weight: np.ndarray, shift: np.ndarray | float) -> Expected:
    """x @ weight^T + shift in float32."""
    magnitude = abs(x) @ abs(weight).T + abs(shift)
    return Expected(x @ weight.T + shift, (4 + np.sqrt(x.shape[-1])) * FLOAT32_EPS * magnitude)


def expected_router_logits(a):
    rows, weight = input_rows(a), a.factor * exact(a.weight)
    logits = dot_products(rows.value, weight, 0.0 if a.bias is None else exact(a.bias))
    inherited = DEVIATIONS * np.sqrt(rows.deviation**2 @ (weight**2).T)
    return [Expected(logits.value, logits.error + inherited)]


def expected_moe_gate(a):
    x = exact(a.x)
    flat = x.reshape(np.prod(x.shape[:-1], dtype=int), x.shape[-1])
    rows = normed(flat, exact(a.norm_weight), a.norm_eps).value
    weight, scale = exact(a.weight), exact(a.per_expert_scale)
    logits = rows @ weight.T
    # Roundings are independent of each other: their sum is far below the bound that grows with the width.
    error = 4 * FLOAT32_EPS * (abs(rows) @ abs(weight).T).max(-1, initial=0.0)
    ids = np.array([oracles.descending(row)[: a.top_k] for row in logits], dtype=np.int64)
    ids = ids.reshape(-1, a.top_k)
    gaps = np.array([oracles.gap(row, a.top_k) for row in logits])
    sure = (gaps > 2 * error)[:, None]
    weights = oracles.gate_weights(logits, ids, scale, a.renormalize_after_scale)
    relative = 64 * FLOAT32_EPS + error[:, None]
    if a.renormalize_after_scale:  # scales of both signs cancel in the sum
        plain = oracles.gate_weights(logits, ids, scale, False)
        total, size = plain.sum(-1, keepdims=True), abs(plain).sum(-1, keepdims=True)
        relative = relative * (1 + size / np.where(total == 0, 1.0, abs(total)))
    results = [Expected(weights, relative * abs(weights) + 1e-36, sure), Expected(ids, None, sure)]
    return with_leading(results, x.shape[:-1])


def expected_moe_bucket(a):
    lists, rest = oracles.pairs_of_experts(a.topk_ids.numpy(), a.num_experts)
    offsets = np.cumsum([0, *map(len, lists)])
    return [Expected(np.array([p for pairs in lists for p in pairs] + rest)), Expected(offsets)]


def expected_moe_compute_ids_tpe(a):
    lists, _ = oracles.pairs_of_experts(a.topk_ids.numpy(), a.num_experts)
    pairs = a.topk_ids.numel()
    padded = np.array([p + [-1] * (pairs - len(p)) for p in lists]).reshape(a.num_experts, pairs)
    counts = np.array([len(p) for p in lists])
    tiles = max(1, -(-counts.max() // 32))
    grids = [np.array([tiles, -(-rows // 64), a.num_experts]) for rows in (a.gate_up_rows, a.down_rows)]
    return [Expected(counts), Expected(padded), *map(Expected, grids)]


def invalid_top_k(zeros):
    """Of each router: one function checks it for all."""
    return [wrong("between 1 and 8, the smaller of E and 64", top_k=E + 1)]


invalid_moe_router_topk_softmax = invalid_fused_moe_routing = invalid_moe_gate = invalid_top_k


def invalid_router_logits(zeros):
    return [wrong("a finite number", factor=float("inf"))]


def invalid_moe_router(zeros):
    return [
        *invalid_top_k(zeros),
        wrong("between 1 and 8, the smaller of E and 64", top_k=0),
        wrong("between 1 and 64, the smaller of E and 64", top_k=65, logits=zeros(T, 128)),
        wrong("between 1 and 8", num_groups=0),
        wrong("a divisor of the 8 experts", num_groups=3),
        wrong("at most 4, for 2 experts a group with top2_sum", num_groups=E, group_score="top2_sum"),
        wrong("between 1 and 4", top_groups=5, num_groups=4),
        wrong("between 1 and 4", top_groups=0, num_groups=4),
        wrong("at most 2, the experts in top_groups groups", top_k=3, num_groups=4, top_groups=1),
    ]
