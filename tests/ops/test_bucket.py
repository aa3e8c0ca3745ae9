"""Sorting the pairs of token and slot by expert."""

import pytest
import torch
from support.oracles_operators import checked
from support.routing import random_ids
from support.sweep import rows_in_sweep


def check_sorting(ids, num_experts, gate_up_rows=100, down_rows=65):
    results = (
        *checked("moe_bucket", ids, num_experts=num_experts),
        *checked(
            "moe_compute_ids_tpe",
            ids,
            num_experts=num_experts,
            gate_up_rows=gate_up_rows,
            down_rows=down_rows,
        ),
    )
    assert {tensor.dtype for tensor in results} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sorting(device, dtype):
    cases = [
        ((1, 1), 1),
        ((3, 2), 4),
        ((1, 8), 128),
        ((33, 8), 60),
        ((70, 1), 3),
        ((130, 4), 257),
        ((9, 6), 1024),
    ]
    for i, (shape, num_experts) in enumerate(cases):
        check_sorting(random_ids(shape, 0, num_experts, i, dtype).to(device), num_experts, 64 * i + 1, 4096)
        check_sorting(random_ids(shape, -2, num_experts + 3, i, dtype).to(device), num_experts)


MANY = ((700, 8, 60), (330, 7, 1024), (3100, 11, 9))


@pytest.mark.parametrize("tokens, top_k, num_experts", rows_in_sweep(MANY, MANY[1:2]))
def test_sorting_of_many_pairs(device, tokens, top_k, num_experts):
    """More pairs than one threadgroup sorts, and more than all of them hold at a time."""
    check_sorting(random_ids((tokens, top_k), -1, num_experts + 1, tokens).to(device), num_experts)


def test_sorting_when_all_choose_one_expert(device):
    for expert in (0, 6, 7, -1):
        check_sorting(torch.full((40, 2), expert, dtype=torch.int32, device=device), 7)
        check_sorting(torch.full((16, 2), expert, dtype=torch.int32, device=device), 7)  # a full tile


def test_sorting_of_distant_sentinels(device):
    """An int64 id is compared as such, not by its lower half."""
    ids = torch.tensor([[2**32 + 1, 1], [-(2**40), 2**62], [2, 3]], device=device)
    check_sorting(ids, 3)
    check_sorting(torch.tensor([[2**31 - 1, 0], [-(2**31), 2]], dtype=torch.int32, device=device), 3)
