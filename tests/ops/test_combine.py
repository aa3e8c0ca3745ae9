"""The gated activation and the weighted sums over a token's experts."""

import numpy as np
import pytest
import torch
from support.oracles import exact, round_to
from support.values import random

from torch_moe_mps.ops.families.combine import (
    moe_weighted_reduce,
    silu_mul_stacked,
    weighted_sum_residual_norm_stacked_,
    weighted_sum_residual_stacked_,
    weighted_sum_stacked,
)

EPS = 1e-6


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
    normed = weighted_sum_residual_norm_stacked_(residual, slots, ones, weight, norm_eps=3 * 256.0**2)
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
        assert (exact(moe_weighted_reduce(slots, ones)) == total).all()
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
    assert torch.equal(moe_weighted_reduce(slots, weights), together)
    assert torch.equal(weighted_sum_stacked(slots, weights), together)


def test_empty(device):
    def zeros(*shape):
        return torch.zeros(shape, device=device)

    assert silu_mul_stacked(zeros(0, 8), zeros(0, 8)).shape == (0, 8)
    assert silu_mul_stacked(zeros(2, 0), zeros(2, 0)).shape == (2, 0)
    assert weighted_sum_stacked(zeros(0, 4, 8), zeros(0, 4)).shape == (0, 8)
    assert weighted_sum_stacked(zeros(2, 4, 0), zeros(2, 4)).shape == (2, 0)
    weighted_sum_residual_stacked_(zeros(0, 8), zeros(0, 4, 8), zeros(0, 4))
    normed = weighted_sum_residual_norm_stacked_(
        zeros(0, 8), zeros(0, 4, 8), zeros(0, 4), zeros(8), norm_eps=EPS
    )
    assert normed.shape == (0, 8)
    empty = torch.zeros(2, 0, 1, device=device) * 1
    assert empty.stride() == (0, 1, 0)  # as PyTorch leaves an empty result
    weighted_sum_residual_stacked_(empty, zeros(2, 0, 3, 1), zeros(2, 0, 3))
    assert moe_weighted_reduce(zeros(0, 4, 8), zeros(0, 4)).shape == (0, 8)
    assert moe_weighted_reduce(zeros(0, 8), zeros(0, 4), residual=zeros(0, 8)).shape == (0, 8)


def test_rounding_of_16_bit_sums_happens_once(device):
    """In float16 2048 + 0.75 + 0.75 is 2050 when rounded once, and 2048 when rounded in between."""
    slots = torch.tensor([[[2048.0], [0.75], [0.75]]], dtype=torch.float16, device=device)
    ones = torch.ones(1, 3, dtype=torch.float16, device=device)
    assert float(weighted_sum_stacked(slots, ones)) == 2050.0
    residual = torch.full((1, 1), 0.75, dtype=torch.float16, device=device)
    weighted_sum_residual_stacked_(residual, slots[:, :2], ones[:, :2])
    assert float(residual) == 2050.0
    assert round_to(np.array(2049.5), torch.float16) == 2050.0


def test_overlap_of_transposed_views(device):
    """Dense in memory, though not contiguous: refused on the CPU as on mps."""
    square = torch.zeros(8, 8, device=device)
    slots, weights = torch.ones(8, 2, 8, device=device), torch.ones(8, 2, device=device)
    with pytest.raises(ValueError, match="residual_ must be free of overlap with norm_weight, got a view"):
        weighted_sum_residual_norm_stacked_(square.t(), slots, weights, square[0], norm_eps=1e-6)
    weighted_sum_residual_norm_stacked_(
        square.t(), slots, weights, torch.ones(8, device=device), norm_eps=1e-6
    )
    assert torch.equal(square.cpu(), torch.full((8, 8), 2.0))
