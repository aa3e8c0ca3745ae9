"""Checks of routers, gates and the sorting of pairs against the oracles."""

import numpy as np
import torch

from support.oracles import assert_rounded, exact, gap, gate_logits, gate_weights, pairs_of_experts
from support.values import random
from torch_moe_mps.ops.routing import moe_bucket, moe_compute_ids_tpe, moe_gate

# Two exponentials, a sum over the experts and a division; exp(x) magnifies the rounding of x.
WEIGHT_ERRORS = 64


def assert_routing(weights, ids, expected_weights, expected_ids, float32_errors=WEIGHT_ERRORS):
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ids.is_contiguous()
    np.testing.assert_array_equal(ids.cpu().numpy(), expected_ids)
    assert_rounded(weights, expected_weights, abs(expected_weights), float32_errors)


def check_gate(hidden, router_weight, norm_weight, scale, top_k, renormalize, device):
    """Returns the number of rows whose order float32 can decide."""
    h, r, n, s = (exact(tensor) for tensor in (hidden, router_weight, norm_weight, scale))
    logits = gate_logits(h, r, n, 1e-6)
    magnitude = gate_logits(abs(h), abs(r), abs(n), 1e-6).max()
    sure = np.array([gap(row, top_k) for row in logits]) > 1e-3
    logits = logits[sure]
    tensors = hidden[sure], router_weight, norm_weight, scale
    weights, ids = moe_gate(*(tensor.to(device) for tensor in tensors), top_k, 1e-6, renormalize)
    expected_ids = np.argsort(-logits, axis=1)[:, :top_k]
    expected = gate_weights(logits, expected_ids, s, renormalize)
    assert_routing(weights, ids, expected, expected_ids, WEIGHT_ERRORS + 4 * magnitude)
    return sure.sum()


def gate_arguments(tokens, width, num_experts, hidden_dtype, weight_dtype, seed):
    return (
        random((tokens, width), hidden_dtype, seed, 2.0),
        random((num_experts, width), weight_dtype, seed + 1, width**-0.5),
        random((width,), weight_dtype, seed + 2) + 1.0,
        torch.rand(num_experts, generator=torch.Generator().manual_seed(seed)).to(weight_dtype) + 0.5,
    )


def check_sorting(ids, num_experts, gate_up_rows=100, down_rows=65):
    lists, rest = pairs_of_experts(ids.cpu().numpy(), num_experts)
    pair_order, offsets = moe_bucket(ids, num_experts)
    assert pair_order.dtype == offsets.dtype == torch.int32
    assert pair_order.tolist() == [pair for pairs in lists for pair in pairs] + rest
    counts = [len(pairs) for pairs in lists]
    assert offsets.tolist() == [0, *np.cumsum(counts).tolist()]

    tpe, ids_by_expert, *grids = moe_compute_ids_tpe(ids, num_experts, gate_up_rows, down_rows)
    assert tpe.tolist() == counts
    assert ids_by_expert.tolist() == [pairs + [-1] * (ids.numel() - len(pairs)) for pairs in lists]
    for grid, rows in zip(grids, (gate_up_rows, down_rows), strict=True):
        assert grid.tolist() == [max(1, -(-max(counts) // 32)), -(-rows // 64), num_experts]
    assert {tensor.dtype for tensor in (tpe, ids_by_expert, *grids)} == {torch.int32}


def random_ids(shape, low, high, seed, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
