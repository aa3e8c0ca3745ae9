"""The gated activation and the weighted sums over a token's experts."""

import itertools

import numpy as np
import pytest
import torch
from support.oracles import exact, round_to
from support.oracles_operators import check_tensor, checked, expected
from support.values import DTYPES, random

from torch_moe_mps.ops.combine import (
    moe_weighted_reduce,
    silu_mul_stacked,
    weighted_sum_residual_norm_stacked_,
    weighted_sum_residual_stacked_,
    weighted_sum_stacked,
)

EPS = 1e-6


def check_sums(residual, slots, weights, norm_weight):
    """The three sums over these slots; `residual` keeps its values."""
    checked("weighted_sum_stacked", slots, weights)
    updated, again = (clone_in_place(residual) for _ in range(2))
    assert checked("weighted_sum_residual_stacked_", updated, slots, weights) is None
    normed = checked("weighted_sum_residual_norm_stacked_", again, slots, weights, norm_weight, EPS)
    assert torch.equal(again, updated)
    rows = {"input": again, "weight": norm_weight, "eps": EPS}  # what the norm sees is rounded
    check_tensor(normed, *expected("rms_norm", rows), "the norm of the sum")


def clone_in_place(tensor):
    """A copy with the strides of the original, in its own storage with space around it."""
    base = tensor if tensor._base is None else tensor._base
    copy = base.clone(memory_format=torch.preserve_format)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(device, dtype):
    for i, shape in enumerate([(1,), (31,), (3, 33), (2, 127), (2, 3, 300), (3, 3001)]):
        checked("silu_mul_stacked", *(random(shape, dtype, 2 * i + j, 4.0).to(device) for j in range(2)))


def test_silu_of_large_arguments(device):
    """exp(-gate) overflows float32 below -88; silu goes to -0 there and to gate above."""
    gate = torch.tensor([-3e38, -1000.0, -100.0, -87.0, 0.0, 87.0, 1000.0, 3e38], device=device)
    result = exact(silu_mul_stacked(gate, torch.ones_like(gate)))
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result[4:], [0.0, 87.0, 1000.0, float(gate[7])], rtol=1e-6)
    np.testing.assert_allclose(result[:4], [0.0, 0.0, 0.0, -87 * np.exp(-87.0)], rtol=1e-5, atol=1e-38)
    bad = torch.tensor([float("nan"), 1.0, float("inf")], device=device)
    result = silu_mul_stacked(bad, torch.tensor([1.0, float("nan"), 2.0], device=device)).cpu()
    assert result[:2].isnan().all() and result[2] == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(device, dtype):
    cases = [((), 1, 1), ((1,), 8, 31), ((3,), 2, 33), ((2, 2), 4, 127), ((2,), 22, 300), ((1,), 10, 2050)]
    for i, (leading, slots, width) in enumerate(cases):
        check_sums(
            random((*leading, width), dtype, 10 * i).to(device),
            random((*leading, slots, width), dtype, 10 * i + 1).to(device),
            random((*leading, slots), torch.float32 if i % 2 else dtype, 10 * i + 2).to(device),
            random((width,), dtype if i % 2 else torch.float32, 10 * i + 3).to(device),
        )


def test_longest_row(device):
    """More than a threadgroup's memory and registers hold."""
    for width in (16384, 8201):
        shapes = ((width,), (2, width), (2,), (width,))
        check_sums(*(random(shape, torch.float16, seed).to(device) for seed, shape in enumerate(shapes)))


def test_many_slots_and_rows(device):
    """More slots than a simdgroup has lanes, and rows enough for larger threadgroups."""
    for leading, slots, width in (((2,), 40, 36), ((1,), 64, 5), ((9,), 3, 2052), ((17,), 2, 1021)):
        shapes = ((*leading, width), (*leading, slots, width), (*leading, slots), (width,))
        check_sums(*(random(shape, torch.bfloat16, seed).to(device) for seed, shape in enumerate(shapes)))


def test_in_place_writes_through_views_only(device):
    storage = torch.zeros(4, 5, 6, device=device)
    view = storage[1:3, :, 2:4].transpose(0, 1)
    slots = torch.arange(40.0, device=device).view(5, 2, 2, 2)
    weighted_sum_residual_stacked_(view, slots, torch.ones(5, 2, 2, device=device))
    expected = np.zeros((4, 5, 6))
    expected[1:3, :, 2:4] = exact(slots).sum(2).transpose(1, 0, 2)
    assert (exact(storage) == expected).all()


def test_norm_sees_the_rounded_residual(device):
    """As in fused_residual_norm: 256 + 1 is 256 in bfloat16, and the norm is that of 256."""
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    slots = torch.full((1, 2, 64), 0.5, dtype=torch.bfloat16, device=device)
    weight = torch.full((64,), 1 + 2.0**-8 - 2.0**-12, device=device)
    ones = torch.ones(1, 2, device=device)
    normed = weighted_sum_residual_norm_stacked_(residual, slots, ones, weight, 3 * 256.0**2)
    assert (exact(residual) == 256.0).all() and (exact(normed) == 0.5).all()


def test_slots_are_added_in_ascending_order(device):
    """1e8 swallows what is added to it one by one: each order of the slots has its own float32 result."""
    column = torch.tensor([1e8, 3.0, 3.0, 3.0, -1e8, 3.0])
    for shift in range(6):
        terms = column.roll(shift)
        total = np.float32(0.0)
        for term in terms.numpy():
            total = np.float32(total + term)
        slots = terms.to(device).view(1, 6, 1).expand(1, 6, 40)
        ones = torch.ones(1, 6, device=device)
        assert (exact(weighted_sum_stacked(slots, ones)) == total).all()
        assert (exact(moe_weighted_reduce(ones, slots)) == total).all()
        residual = torch.zeros(1, 40, device=device)
        weighted_sum_residual_stacked_(residual, slots, ones)
        assert (exact(residual) == total).all()


def test_a_token_does_not_depend_on_the_others(device):
    slots, weights = (
        random((65, 8, 96), torch.float32, 0).to(device),
        random((65, 8), torch.float32, 1).to(device),
    )
    together = weighted_sum_stacked(slots, weights)
    for i in (0, 31, 64):
        assert torch.equal(weighted_sum_stacked(slots[i : i + 1], weights[i : i + 1])[0], together[i])
    assert torch.equal(moe_weighted_reduce(weights, slots), together)
    assert torch.equal(weighted_sum_stacked(slots, weights), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_reduce(device, dtype):
    for i, (tokens, top_k, width) in enumerate(
        [(1, 1, 1), (3, 2, 31), (2, 8, 33), (5, 22, 300), (1, 4, 2050)]
    ):
        weights = random((tokens, top_k), torch.float32 if i % 2 else dtype, 10 * i).to(device)
        expert_out = random((tokens, top_k, width), dtype, 10 * i + 1).to(device)
        gate = random((tokens, 1), torch.float32 if i % 2 else dtype, 10 * i + 2, 3.0).to(device)
        shared, residual = (random((tokens, width), dtype, 10 * i + j).to(device) for j in (3, 4))
        flat = expert_out.view(tokens * top_k, width)
        every = {"shared_gate": gate[:, 0], "shared_out": shared, "residual": residual, "gate_is_logit": True}
        checked("moe_weighted_reduce", weights, expert_out)
        checked("moe_weighted_reduce", weights, flat, residual=residual)
        checked("moe_weighted_reduce", weights, expert_out, shared_out=shared)
        checked("moe_weighted_reduce", weights, flat, shared_gate=gate, shared_out=shared)
        checked("moe_weighted_reduce", weights, expert_out, **every)


def test_empty(device):
    def zeros(*shape):
        return torch.zeros(shape, device=device)

    assert silu_mul_stacked(zeros(0, 8), zeros(0, 8)).shape == (0, 8)
    assert silu_mul_stacked(zeros(2, 0), zeros(2, 0)).shape == (2, 0)
    assert weighted_sum_stacked(zeros(0, 4, 8), zeros(0, 4)).shape == (0, 8)
    assert weighted_sum_stacked(zeros(2, 4, 0), zeros(2, 4)).shape == (2, 0)
    weighted_sum_residual_stacked_(zeros(0, 8), zeros(0, 4, 8), zeros(0, 4))
    normed = weighted_sum_residual_norm_stacked_(zeros(0, 8), zeros(0, 4, 8), zeros(0, 4), zeros(8), EPS)
    assert normed.shape == (0, 8)
    empty = torch.zeros(2, 0, 1, device=device) * 1
    assert empty.stride() == (0, 1, 0)  # as PyTorch leaves an empty result
    weighted_sum_residual_stacked_(empty, zeros(2, 0, 3, 1), zeros(2, 0, 3))
    assert moe_weighted_reduce(zeros(0, 4), zeros(0, 4, 8)).shape == (0, 8)
    assert moe_weighted_reduce(zeros(0, 4), zeros(0, 8), residual=zeros(0, 8)).shape == (0, 8)


def test_rounding_of_16_bit_sums_happens_once(device):
    """In float16 2048 + 0.75 + 0.75 is 2050 when rounded once, and 2048 when rounded in between."""
    slots = torch.tensor([[[2048.0], [0.75], [0.75]]], dtype=torch.float16, device=device)
    ones = torch.ones(1, 3, dtype=torch.float16, device=device)
    assert float(weighted_sum_stacked(slots, ones)) == 2050.0
    residual = torch.full((1, 1), 0.75, dtype=torch.float16, device=device)
    weighted_sum_residual_stacked_(residual, slots[:, :2], ones[:, :2])
    assert float(residual) == 2050.0
    assert round_to(np.array(2049.5), torch.float16) == 2050.0


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
def test_sweep(device, dtype):
    widths = (1, 7, 31, 32, 33, 127, 128, 255, 257, 300, 1000, 1024, 2880, 4097)
    sizes = itertools.product((1, 2, 33), (1, 2, 6, 8, 9, 22, 64), widths)
    for (tokens, slots, width), weight_dtype in zip(sizes, itertools.cycle(DTYPES), strict=False):
        check_sums(
            random((tokens, width), dtype, 0).to(device),
            random((tokens, slots, width), dtype, 1).to(device),
            random((tokens, slots), weight_dtype, 2).to(device),
            random((width,), weight_dtype, 3).to(device),
        )


def test_overlap_of_transposed_views(device):
    """Dense in memory, though not contiguous: refused on the CPU as on mps."""
    square = torch.zeros(8, 8, device=device)
    slots, weights = torch.ones(8, 2, 8, device=device), torch.ones(8, 2, device=device)
    with pytest.raises(ValueError, match="residual_ must be free of overlap with norm_weight, got a view"):
        weighted_sum_residual_norm_stacked_(square.t(), slots, weights, square[0], 1e-6)
    weighted_sum_residual_norm_stacked_(square.t(), slots, weights, torch.ones(8, device=device), 1e-6)
    assert torch.equal(square.cpu(), torch.full((8, 8), 2.0))
