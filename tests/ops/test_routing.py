"""Routers: the choice of experts from logits, and their weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layouts import lay
from support.oracles import LARGEST, finite
from support.oracles_operators import checked
from support.routing import ROUTERS, random_ids, router_options
from support.values import random

from torch_moe_mps import ops
from torch_moe_mps.ops.families.routing import moe_router, moe_router_topk_softmax

NAN, INF = float("nan"), float("inf")


def check_router(logits, top_k, device, layout="contiguous", **options):
    placed = {k: lay(v, layout, device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    weights, ids = checked("moe_router", lay(logits, layout, device), top_k, **placed)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


@pytest.mark.parametrize("name", ROUTERS)
def test_router_of_each_kind(device, name):
    for i, (num_experts, top_k) in enumerate([(8, 2), (60, 4), (64, 6), (128, 8), (256, 8)]):
        logits = random((6, num_experts), torch.float32, 10 * i, 1.5)
        check_router(logits, top_k, device, **router_options(name, num_experts, top_k, 10 * i + 1))


def all_routers(logits, top_k):
    """What every router gives that needs nothing but the logits."""
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus", "softmax_after_topk"):
        yield checked("moe_router", logits, top_k, scoring=scoring, norm_topk_prob=True)
    yield checked("moe_router_topk_softmax", logits, top_k, norm_topk_prob=True)
    yield checked("fused_moe_routing", logits, torch.ones(logits.shape[-1], device=logits.device), top_k)


def check_degenerate(logits, top_k):
    for _, ids in all_routers(logits, top_k):
        assert all(len(set(row)) == top_k for row in ids.tolist())


def test_ties_go_to_the_lower_id(device):
    rows = torch.zeros(5, 70)
    rows[1, 40:] = 1.0
    rows[2, ::2] = -0.0  # equal to 0.0
    rows[3] = torch.arange(70) // 3 % 5
    rows[4, 33] = rows[4, 69] = 2.0
    check_degenerate(rows.to(device), 8)


def test_ties_among_many_rows(device):
    """Some rows have ties among the leaders, at the last of them, only below, or none."""
    rows = random((60, 70), torch.float32, 0)
    rows[::4] = rows[::4].round()
    rows[1::4, 40] = rows[1::4].sort(dim=1).values[:, -8]
    rows[2::4, :30] = -9.0
    check_degenerate(rows.to(device), 8)
    check_degenerate(rows[:, :1].to(device), 1)


def test_degenerate_logits(device):
    rows = random((10, 40), torch.float32, 0)
    rows[0] = NAN
    rows[1] = INF
    rows[2] = -INF
    rows[3, 5:9] = NAN
    rows[4, [3, 30]] = INF
    rows[5, 2:] = -INF
    rows[6] = NAN
    rows[6, [7, 20, 21]] = torch.tensor([-INF, INF, 0.0])
    rows[7] = LARGEST
    rows[8, 10:] = -LARGEST
    rows[9, ::2] = NAN
    check_degenerate(rows.to(device), 6)
    check_degenerate(rows[:7].half().to(device), 6)
    weights, ids = moe_router_topk_softmax(rows[:3].to(device), 6, norm_topk_prob=True)
    assert ids.tolist() == [list(range(6))] * 3
    assert (weights == weights[0, 0]).all()


def test_saturated_scores_are_told_apart_by_their_logits(device):
    """sigmoid(30) = sigmoid(40) = 1 in float32, and exp(-200) = exp(-300) = 0."""
    logits = torch.tensor([[30.0, 40.0, 35.0, 100.0, -200.0, -300.0]], device=device)
    for _, ids in all_routers(logits, 6):
        assert ids.tolist() == [[3, 1, 2, 0, 4, 5]]
    _, ids = moe_router(
        logits, 2, scoring="sigmoid", num_groups=3, top_groups=1, group_score="max", norm_topk_prob=True
    )
    assert ids.tolist() == [[3, 2]]


def test_bias_and_groups_of_degenerate_logits(device):
    rows = random((6, 16), torch.float32, 1)
    rows[0] = NAN
    rows[1] = INF
    rows[2, 8:] = -INF
    rows[3, :4] = NAN
    rows[4, 5] = INF
    bias = random((16,), torch.float32, 2).to(device)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus", "softmax_after_topk"):
        for options in ({}, {"num_groups": 4, "top_groups": 2}, {"bias_on_logits": True}):
            weights, ids = moe_router(
                rows.to(device), 5, scoring=scoring, correction_bias=bias, norm_topk_prob=True, **options
            )
            assert torch.isfinite(weights).all()
            for row in ids.tolist():
                assert len(set(row)) == 5 and min(row) >= 0 and max(row) < 16
                if "num_groups" in options:
                    assert len({expert // 4 for expert in row}) <= 2


def test_degenerate_bias(device):
    """A choice is made finite as a logit is: NaN is the lowest, which still comes before what is excluded."""
    logits = torch.zeros(1, 8, device=device)
    bias = torch.tensor([NAN, -INF, INF, 1.0, 9.0, 8.0, 7.0, 6.0], device=device)
    options = {"scoring": "sigmoid", "correction_bias": bias, "norm_topk_prob": True}
    _, ids = moe_router(logits, 8, **options)
    assert ids.tolist() == [[2, 4, 5, 6, 7, 3, 0, 1]]
    _, ids = moe_router(logits, 4, num_groups=2, top_groups=1, group_score="max", **options)
    assert ids.tolist() == [[2, 3, 0, 1]]


def test_group_ties_go_to_the_lower_group(device):
    logits = torch.zeros(1, 12, device=device)
    options = {"num_groups": 4, "top_groups": 2, "norm_topk_prob": True}
    for group_score in ("max", "top2_sum"):
        _, ids = moe_router(logits, 5, scoring="sigmoid", group_score=group_score, **options)
        assert ids.tolist() == [[0, 1, 2, 3, 4]]
    sums_below_the_lowest = torch.tensor([[NAN, NAN, NAN, -1.0]], device=device)
    options = {"num_groups": 2, "top_groups": 1, "norm_topk_prob": False}
    _, ids = moe_router(sums_below_the_lowest, 2, scoring="softmax_after_topk", **options)
    assert ids.tolist() == [[0, 1]]


def test_masked_score(device):
    """With the fill value 0.0 an expert of another group wins over a negative choice; else it never does."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 0.0]], device=device)
    bias = torch.tensor([0.0, -2.0, -0.5, 0.0], device=device)
    options = {
        "scoring": "sigmoid",
        "correction_bias": bias,
        "num_groups": 2,
        "top_groups": 1,
        "group_score": "max",
    }
    _, ids = moe_router(logits, 2, norm_topk_prob=True, **options)
    assert ids.tolist() == [[0, 1]]
    _, ids = moe_router(logits, 2, norm_topk_prob=True, masked_score=0.0, **options)
    assert ids.tolist() == [[0, 2]]
    options = {"scoring": "sigmoid", "num_groups": 2, "top_groups": 1, "norm_topk_prob": True}
    _, ids = moe_router(
        torch.tensor([[-3.0, -2.0, -4.0, -5.0]], device=device), 2, masked_score=0.0, **options
    )
    assert ids.tolist() == [[1, 0]]  # scores are compared with the fill value, not logits


def test_denominators(device):
    """A sum of zero divides by 1 instead of giving NaN; sum_eps and sum_min as they are defined."""
    logits = torch.full((1, 4), -200.0, device=device)
    for sum_eps in (0.0, 1e-20):
        weights, _ = moe_router(logits, 2, scoring="sigmoid", norm_topk_prob=True, sum_eps=sum_eps)
        assert weights.tolist() == [[0.0, 0.0]]
    logits = torch.zeros(1, 4, device=device)
    weights, _ = moe_router(logits, 2, scoring="sigmoid", norm_topk_prob=True, sum_eps=3.0)
    assert weights.tolist() == [[0.125, 0.125]]
    weights, _ = moe_router(logits, 2, scoring="sigmoid", norm_topk_prob=True, sum_min=8.0)
    assert weights.tolist() == [[0.0625, 0.0625]]


@given(st.integers(1, 30), st.integers(1, 200), st.data())
@settings(max_examples=40, deadline=None)
def test_ties_of_any_shape_on_cpu(tokens, num_experts, data):
    """Logits from five values, so that nearly every comparison is a tie or involves a degenerate one."""
    top_k = data.draw(st.integers(1, min(64, num_experts)))
    seed = data.draw(st.integers(0, 2**30))
    values = torch.tensor([NAN, -INF, -1.0, 0.0, 2.0, INF])
    check_degenerate(values[random_ids((tokens, num_experts), 0, 6, seed, torch.int64)], top_k)


def test_finite_of_the_oracle():
    """How the oracle reads degenerate values, on which the tests above rely."""
    assert finite(np.array([NAN, INF, -INF, 1.0])).tolist() == [-LARGEST, LARGEST, -LARGEST, 1.0]


@pytest.mark.parametrize("leading", [(), (2, 3), (0, 4), (2, 1, 20)])
def test_leading_dimensions(device, leading):
    """Of all routers, against float64: [..., E] and [..., H]."""
    x, weight = random((*leading, 24), torch.float32, 1), random((16, 24), torch.float32, 2)
    norm_weight, scale = random((24,), torch.float32, 3), random((16,), torch.float32, 4).abs()
    logits = (x @ weight.T).to(device)
    found = logits.cpu().double()
    best = found.topk(3)
    probabilities = found.softmax(-1).gather(-1, best.indices)
    selected = best.values.softmax(-1)
    scaled = selected * scale.double()[best.indices]
    for (weights, ids), expected in (
        (ops.moe_router(logits, 3, scoring="softmax", norm_topk_prob=False), probabilities),
        (ops.moe_router_topk_softmax(logits, 3, norm_topk_prob=True), selected),
        (ops.fused_moe_routing(logits, scale.to(device), 3), scaled),
    ):
        assert ids.shape == (*leading, 3) and torch.equal(ids.cpu().long(), best.indices)
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    given = [tensor.to(device) for tensor in (x, weight)]
    torch.testing.assert_close(ops.router_logits(*given).cpu(), x @ weight.T, rtol=1e-4, atol=1e-4)
    rows = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
    best = (rows @ weight.double().T).topk(3)
    weights, ids = ops.moe_gate(
        *given, norm_weight.to(device), scale.to(device), 3, norm_eps=1e-6, renormalize_after_scale=False
    )
    assert ids.shape == (*leading, 3) and torch.equal(ids.cpu().long(), best.indices)
    expected = best.values.softmax(-1) * scale.double()[best.indices]
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-4, atol=1e-5)
