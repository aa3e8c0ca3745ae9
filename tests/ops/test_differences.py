"""Differences from the source kernels: what ours do, as the table of docs/operators.md says.

Expected values are by hand, or in float64. What the sources do is read in their text: nothing runs them.
"""

import re
from functools import partial

import pytest
import torch
from support.processes import REPOSITORY

from torch_moe_mps import ops

NAN, INF = float("nan"), float("inf")
ULP = torch.finfo(torch.float32).eps


def placed(device, *rows, dtype=torch.float32):
    return [torch.tensor(values, dtype=dtype).to(device) for values in rows]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rows_without_a_largest_logit(device):
    """NaN and -inf are the lowest float32: equal, so that the lowest ids are chosen, each once."""
    for value in (NAN, -INF):
        (logits,) = placed(device, [[value] * 6])
        ones = torch.ones(6, device=device)
        for weights, ids in (
            ops.moe_router_topk_softmax(logits, 3, norm_topk_prob=True),
            ops.fused_moe_routing(logits, ones, 3),
            # A gate whose only column is 1 has the weights themselves as logits.
            ops.moe_gate(
                ones[:1, None],
                logits.T.contiguous(),
                ones[:1],
                ones,
                3,
                norm_eps=0.0,
                renormalize_after_scale=True,
            ),
        ):
            assert ids.tolist() == [[0, 1, 2]]
            torch.testing.assert_close(weights.cpu(), torch.full((1, 3), 1 / 3))


def test_a_single_nan(device):
    """It is chosen last, and changes no other weight."""
    (logits,) = placed(device, [0.0, NAN, 1.0])
    expected = torch.tensor([1.0, 0.0], dtype=torch.float64).softmax(-1)
    for weights, ids in (
        ops.fused_moe_routing(logits, torch.ones(3, device=device), 2),
        ops.moe_router_topk_softmax(logits, 2, norm_topk_prob=True),
    ):
        assert ids.tolist() == [2, 0]
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-6, atol=0.0)


def test_infinite_logits(device):
    """+inf is the largest float32: its weight is 1, where inf - inf would be NaN."""
    (logits,) = placed(device, [0.0, INF, 1.0])
    ones = torch.ones(3, device=device)
    for weights, ids in (
        ops.fused_moe_routing(logits, ones, 2),
        ops.moe_router_topk_softmax(logits, 2, norm_topk_prob=True),
        ops.moe_gate(
            ones[:1, None], logits[:, None], ones[:1], ones, 2, norm_eps=0.0, renormalize_after_scale=True
        ),
    ):
        assert ids.flatten().tolist() == [1, 2] and weights.flatten().tolist() == [1.0, 0.0]


def test_probabilities_that_underflow(device):
    """Logits are compared: of 0, -200, -250 and -300, the order is that of the logits."""
    (logits,) = placed(device, [[-300.0, -250.0, 0.0, -300.0, -300.0, -300.0, -200.0, -300.0]])
    ones = torch.ones(8, device=device)
    for weights, ids in (
        ops.moe_router_topk_softmax(logits, 3, norm_topk_prob=True),
        ops.fused_moe_routing(logits, ones, 3),
    ):
        assert ids.tolist() == [[2, 6, 1]] and weights.tolist() == [[1.0, 0.0, 0.0]]


def test_gates_of_any_size(device):
    """3 experts, and 200 of which 9 are chosen, with rows that threadgroup memory does not hold."""
    for experts, top_k, hidden in ((3, 2, 8), (200, 9, 8200)):
        x, weight = random(2, hidden, seed=1), random(experts, hidden, seed=2) / 8
        norm_weight, scale = random(hidden, seed=3), random(experts, seed=4).abs()
        given = [tensor.to(device) for tensor in (x, weight, norm_weight, scale)]
        weights, ids = ops.moe_gate(*given, top_k, norm_eps=1e-6, renormalize_after_scale=False)
        rows = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        best = ((rows * norm_weight.double()) @ weight.double().T).topk(top_k)
        assert torch.equal(ids.cpu().long(), best.indices)
        expected = best.values.softmax(-1) * scale.double()[best.indices]
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-4, atol=1e-6)


def test_a_sum_of_scales_that_is_zero(device):
    """It counts as 1: weights that cancel stay, and zeros stay zeros."""
    x, weight, norm_weight = placed(device, [[1.0]], [[2.0], [2.0], [0.0]], [1.0])
    for scales, expected in (([1.0, -1.0, 1.0], [[0.5, -0.5]]), ([0.0, 0.0, 0.0], [[0.0, 0.0]])):
        (scale,) = placed(device, scales)
        weights, ids = ops.moe_gate(
            x, weight, norm_weight, scale, 2, norm_eps=0.0, renormalize_after_scale=True
        )
        assert ids.tolist() == [[0, 1]] and weights.tolist() == expected


def test_more_than_32_experts_of_a_token(device):
    logits = torch.arange(48.0).flip(0)[None]
    weights, ids = ops.moe_router_topk_softmax(logits.to(device), 40, norm_topk_prob=True)
    assert ids.tolist() == [[*range(40)]]
    expected = logits.double()[:, :40].softmax(-1)
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-30)


def test_the_least_sum_of_probabilities(device):
    """1 / E, which is above 2^-14 for all E up to 1024: the weight of the one expert is 1."""
    weights, ids = ops.moe_router_topk_softmax(torch.zeros(1, 1024, device=device), 1, norm_topk_prob=True)
    assert weights.tolist() == [[1.0]] and ids.tolist() == [[0]]


def test_more_experts_than_1024(device):
    logits, ones = torch.zeros(1, 1025, device=device), torch.ones(1025, device=device)
    for call in (
        lambda: ops.moe_router_topk_softmax(logits, 1, norm_topk_prob=True),
        lambda: ops.fused_moe_routing(logits, ones, 1),
    ):
        with pytest.raises(
            ValueError, match=r"logits must be \[..., E\] with E between 1 and 1024, got E = 1025"
        ):
            call()
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="num_experts must be between 1 and 1024, got 1025"):
        ops.moe_compute_ids_tpe(ids, num_experts=1025, gate_up_rows=64, down_rows=64)
    with pytest.raises(ValueError, match="top_k must be between 1 and 64, the smaller of E and 64, got 65"):
        ops.fused_moe_routing(logits[:, :100], ones[:100], 65)


def test_sums_over_no_slots(device):
    none, weights = torch.zeros(2, 0, 8, device=device), torch.zeros(2, 0, device=device)
    residual, norm_weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    for call in (
        lambda: ops.weighted_sum_stacked(none, weights),
        lambda: ops.weighted_sum_residual_stacked_(residual, none, weights),
        lambda: ops.weighted_sum_residual_norm_stacked_(residual, none, weights, norm_weight, norm_eps=0.0),
    ):
        with pytest.raises(
            ValueError, match=r"expert_out must be \[..., S, H\] with S at least 1, got S = 0"
        ):
            call()


def test_rows_of_ids(device):
    """A row for each expert, as long as there are pairs."""
    ids = torch.tensor([[1, 0], [1, 2], [0, 1]], device=device)
    tpe, by_expert, *grids = ops.moe_compute_ids_tpe(ids, num_experts=4, gate_up_rows=64, down_rows=64)
    assert tpe.tolist() == [2, 3, 1, 0] and by_expert.shape == (4, 6) and by_expert.is_contiguous()
    assert {tensor.dtype for tensor in (tpe, by_expert, *grids)} == {torch.int32}


def test_the_sum_is_a_result(device):
    x, residual, weight = random(3, 8, seed=20), random(3, 8, seed=21), random(8, seed=22)
    _, total = ops.fused_residual_norm(*(each.to(device) for each in (residual, x, weight)), norm_eps=1e-6)
    assert torch.equal(total.cpu(), residual + x)


@pytest.mark.parametrize("experts", [16, 256])
def test_routing_of_one_token_has_no_race(device, experts):
    """In the simulator a race is a finding, which fails the test."""
    logits, scale = random(experts, seed=5), random(experts, seed=6).abs()
    weights, ids = ops.fused_moe_routing(logits.to(device), scale.to(device), 4)
    best = logits.double().topk(4)
    assert torch.equal(ids.cpu().long(), best.indices)
    expected = best.values.softmax(-1) * scale.double()[best.indices]
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)


def test_pairs_of_an_expert_ascend(device):
    """Behind them is -1; 70 pairs of one expert are three tiles of 32."""
    ids = torch.tensor([[1, 3]] * 35 + [[1, 0]] * 35, device=device, dtype=torch.int32)
    tpe, by_expert, gate_up, down = ops.moe_compute_ids_tpe(ids, num_experts=3, gate_up_rows=65, down_rows=64)
    assert tpe.tolist() == [35, 70, 0]  # 3 is no expert
    assert by_expert[0].tolist() == [*range(71, 140, 2)] + [-1] * 105
    assert by_expert[1].tolist() == [*range(0, 140, 2)] + [-1] * 70
    assert by_expert[2].tolist() == [-1] * 140
    assert gate_up.tolist() == [3, 2, 3] and down.tolist() == [3, 1, 3]


def test_reducing_no_token(device):
    out = ops.moe_weighted_reduce(torch.ones(0, 2, 8, device=device), torch.ones(0, 2, device=device))
    assert out.shape == (0, 8)
    # The shared expert and its gate may be left out.
    expert_out, weights = placed(device, [[[1.0], [2.0]]], [[0.5, 0.25]])
    assert ops.moe_weighted_reduce(expert_out, weights).tolist() == [[1.0]]


def test_sums_in_16_bits_are_rounded_in_front_of_the_norm(device):
    """256 + 1 is 256 in bfloat16, as the residual stream has it; the norm of [256, 256] is 1."""
    residual, x = placed(device, [[256.0, 256.0]], [[1.0, 0.0]], dtype=torch.bfloat16)
    weight = torch.tensor([256.0, 256.0], device=device)
    normed, total = ops.fused_residual_norm(residual, x, weight, norm_eps=0.0)
    assert total.tolist() == [[256.0, 256.0]] and normed.tolist() == [[256.0, 256.0]]
    (scalar,) = placed(device, [1.0])
    assert ops.fused_residual_norm_scalar(residual, x, weight, scalar, norm_eps=0.0).tolist() == [
        [256.0, 256.0]
    ]
    slots, weights = x.unsqueeze(1), torch.ones(1, 1, device=device)
    normed = ops.weighted_sum_residual_norm_stacked_(residual, slots, weights, weight, norm_eps=0.0)
    assert residual.tolist() == [[256.0, 256.0]] and normed.tolist() == [[256.0, 256.0]]
    # Of the unrounded sum, 257, the norm would be about 1.002: 256.5 and 255.5.
    exact = torch.tensor([257.0, 256.0], dtype=torch.float64)
    unrounded = exact / exact.square().mean().sqrt() * 256
    assert unrounded[0] - 256 > 0.4


def test_rows_that_threadgroup_memory_does_not_hold(device):
    """Sums of 9,000 elements: 36 KB in float32."""
    residual, x, weight = random(1, 9000, seed=7), random(1, 9000, seed=8), random(9000, seed=9)
    given = [tensor.to(device) for tensor in (residual, x, weight)]
    (scalar,) = placed(device, [0.5])
    total = residual.double() + x.double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    normed, found = ops.fused_residual_norm(*given, norm_eps=1e-6)
    torch.testing.assert_close(normed.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.cpu(), residual + x)
    scaled = ops.fused_residual_norm_scalar(*given, scalar, norm_eps=1e-6)
    torch.testing.assert_close(scaled.cpu().double(), expected * 0.5, rtol=1e-5, atol=1e-6)


def test_the_order_of_products_in_a_norm(device):
    """Within 3 ulp of the source's residual * scale * weight."""
    residual, slots, weights = random(3, 64, seed=10), random(3, 2, 64, seed=11), random(3, 2, seed=12)
    norm_weight = random(64, seed=13)
    given = [tensor.to(device) for tensor in (residual, slots, weights, norm_weight)]
    found = ops.weighted_sum_residual_norm_stacked_(*given, norm_eps=1e-6).cpu()
    total = given[0].cpu()
    scale = 1.0 / ((total.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).float()
    source = total * scale * norm_weight
    assert ((found - source).abs() <= 3 * ULP * source.abs()).all()


def test_batches(device):
    """The sources sum and route one token in a call; ours take leading dimensions."""
    slots, weights = random(2, 3, 4, 8, seed=14), random(2, 3, 4, seed=15)
    expected = (slots.double() * weights.double().unsqueeze(-1)).sum(-2)
    found = ops.weighted_sum_stacked(slots.to(device), weights.to(device))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    residual = random(2, 3, 8, seed=16)
    added = ops.weighted_sum_residual_stacked_(
        residual.clone().to(device), slots.to(device), weights.to(device)
    )
    torch.testing.assert_close(added.cpu().double(), residual + expected, rtol=1e-5, atol=1e-6)


def test_one_dtype_of_ids(device):
    """int32 or int64 in every router, where moe_gate and fused_moe_routing of the sources write uint32."""
    x, weight, ones = (
        torch.ones(1, 4, device=device),
        torch.eye(4, device=device),
        torch.ones(4, device=device),
    )
    routers = (
        partial(ops.moe_gate, x, weight, ones, ones, 2, norm_eps=1e-6, renormalize_after_scale=False),
        partial(ops.fused_moe_routing, ones, ones, 2),
        partial(ops.moe_router_topk_softmax, ones, 2, norm_topk_prob=True),
        partial(ops.moe_router, ones, 2, scoring="sigmoid", norm_topk_prob=False),
    )
    for route in routers:
        assert route()[1].dtype == torch.int32
        for dtype in (torch.int32, torch.int64):
            for asked in (dtype, str(dtype).removeprefix("torch.")):
                _, ids = route(ids_dtype=asked)
                assert ids.dtype == dtype and ids.flatten().tolist() == [0, 1]
        with pytest.raises(ValueError, match="ids_dtype must be one of int32, int64, got 'uint8'"):
            route(ids_dtype=torch.uint8)


def test_the_table():
    """Each row names a test of this file, every test is named, and docstrings lead to the table."""
    page = (REPOSITORY / "docs" / "operators.md").read_text()
    table = page.partition("## Differences from the source kernels\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    named = [cell for *_, cell in rows]
    tests = [f"`{name}`" for name in globals() if name.startswith("test_") and name != "test_the_table"]
    assert sorted({*named}) == sorted(tests) and len(rows) >= 12
    pointing = "docs/operators.md has the differences"
    for name, function in ops.PUBLIC.items():
        stands = re.search(r"Stands for .*?\n(?=\n|$)", f"{function.__doc__}\n", re.DOTALL)
        assert (stands is None) or (pointing in " ".join(stands[0].split())), name
    kernels = {each for cells in rows for each in re.findall(r"`(\w+)`", cells[0])}
    assert kernels <= {*ops.PUBLIC}
