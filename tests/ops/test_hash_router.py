"""A router whose choice a table has."""

import pytest
import torch
from support.oracles_operators import checked
from support.values import DTYPES, numbers

from torch_moe_mps.ops.routing import moe_hash_router

OPTIONS = {"scoring": "sqrtsoftplus", "norm_topk_prob": True}


def table(rows: int, columns: int, experts: int) -> torch.Tensor:
    """Experts of each token, some of them twice, and ids of none."""
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randint(-1, experts + 1, (rows, columns), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(device, dtype):
    """One token and several, more slots than simdgroups and than lanes, vectors and odd widths, norms."""
    for i, (tokens, width, experts, top_k) in enumerate(
        [(1, 256, 9, 6), (3, 31, 5, 1), (7, 1032, 64, 33), (2, 64, 300, 64)]
    ):
        x = numbers(tokens, width, dtype=dtype, seed=i).to(device)
        weight = numbers(experts, width, dtype=DTYPES[i % 3], seed=i).to(device)
        chosen = torch.arange(tokens) * 5 % 13 - int(i == 2)  # beyond the table on both sides
        given = x, weight, table(12, top_k, experts).to(device), chosen.to(device)
        checked("moe_hash_router", *given, **OPTIONS)
        norm = {
            "norm_weight": numbers(width, dtype=DTYPES[(i + 1) % 3]).to(device),
            "norm_offset": float(i % 2),
        }
        options = {"scoring": "sigmoid", "norm_topk_prob": i % 2 == 0, "scaling_factor": 2.5, "sum_eps": 0.5}
        checked("moe_hash_router", *given, **options, **norm)
        narrow = (each.int() for each in given[2:])
        checked("moe_hash_router", *given[:2], *narrow, **OPTIONS)


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
