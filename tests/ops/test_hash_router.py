"""A router whose choice a table has."""

import pytest
import torch
from support.values import numbers

from torch_moe_mps.ops.routing import moe_hash_router

OPTIONS = {"scoring": "sqrtsoftplus", "norm_topk_prob": True}


def test_tokens_and_experts_that_do_not_exist(device):
    x, weight = numbers(4, 8).to(device), numbers(3, 8).to(device)
    ids = torch.tensor([[0, 2**40], [-1, 3]], device=device)
    weights, found = moe_hash_router(
        x, weight, ids, torch.tensor([0, 1, 2, -(2**40)], device=device), **OPTIONS
    )
    assert found.tolist() == [[0, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert weights.tolist() == [[1.0, 0.0], *[[0.0, 0.0]] * 3]


def test_nan_and_empty(device):
    x = numbers(2, 8).to(device)
    x[1, 3] = torch.nan
    ids, chosen = torch.tensor([[0, 1]], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    weights, _ = moe_hash_router(x, numbers(3, 8).to(device), ids, chosen, **OPTIONS)
    assert weights[0].sum().item() == pytest.approx(1.0) and weights[1].tolist() == [0.0, 0.0]
    empty, _ = moe_hash_router(x[:0], numbers(3, 8).to(device), ids, chosen[:0], **OPTIONS)
    assert empty.shape == (0, 2)
    weights, _ = moe_hash_router(x[:, :0], numbers(3, 0).to(device), ids, chosen, **OPTIONS)
    assert weights.tolist() == [[0.5, 0.5]] * 2
