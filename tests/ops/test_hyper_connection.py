"""hyper_connection and hyper_update against the float64 oracle."""

import pytest
import torch
from support.oracles_operators import checked
from support.values import DTYPES, numbers

# Leading dimensions, streams, columns: one of everything, the models' four streams, a tile of tokens and more
# than one, columns of several threadgroups, no tokens.
SIZES = (
    ((), 1, 4),
    ((1, 1), 4, 256),
    ((2, 5), 2, 132),
    ((17,), 4, 64),
    ((8,), 3, 1032),
    ((0,), 4, 64),
)


def parameters(count, width, parts, device, dtype=torch.float32):
    rows = (count, 2 * count, 2 * count + count * count)[parts - 1]
    tensors = numbers(rows, count * width, scale=(count * width) ** -0.5), numbers(rows), numbers(parts)
    return [tensor.to(dtype).to(device) for tensor in tensors]


def block(leading, count, width, dtype, device, mixes=True):
    """What a block adds, with the names of arguments."""
    comb = numbers(*leading, count, count).softmax(-1).to(device) if mixes else None
    post = numbers(*leading, count).abs().to(device)
    return {"out": numbers(*leading, width, dtype=dtype).to(device), "post": post, "comb": comb}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(device, dtype):
    for leading, count, width in SIZES:
        streams = numbers(*leading, count, width, dtype=dtype).to(device)
        for mixes in (False, True):
            checked("hyper_update", streams, **block(leading, count, width, dtype, device, mixes))
        for parts in (1, 2, 3):
            given = block(leading, count, width, dtype, device, parts == 3) if parts > 1 else {}
            checked("hyper_connection", streams, *parameters(count, width, parts, device), **given)


def test_dtypes_strides_and_numbers(device):
    streams = numbers(3, 64, 4, dtype=torch.bfloat16).to(device).mT
    memory = numbers(3, 65, dtype=torch.bfloat16).to(device)
    given = block((3,), 4, 64, torch.bfloat16, device) | {"out": memory[:, 1:]}
    for dtype in DTYPES:
        fn, base, scale = parameters(4, 64, 3, device, dtype)
        numbers_given = {"norm_eps": 0.1, "eps": 1e-2, "iterations": 3, "post_factor": 0.5, "post_eps": 0.25}
        checked("hyper_connection", streams, fn, base, scale, **given, **numbers_given)
        checked("hyper_connection", streams, fn.mT.contiguous().mT, base, scale, iterations=1)


def test_the_mixture_is_doubly_stochastic(device):
    streams = numbers(9, 4, 256, dtype=torch.float16).to(device)
    *_, comb, _ = torch.ops.moe_mps.hyper_connection(streams, *parameters(4, 256, 3, device))
    assert (comb > 0).all()
    assert (comb.sum(-1) - 1).abs().max() < 1e-3 and (comb.sum(-2) - 1).abs().max() < 1e-4


def test_extreme_logits(device):
    """Gates of 0 and 1, and rows of the mixture with one entry."""
    fn, base, scale = parameters(4, 64, 3, device)
    base = torch.tensor([-200.0, 200.0, 90.0, -90.0] * 6, device=device)
    x, post, comb, _ = checked("hyper_connection", numbers(2, 4, 64).to(device), fn, base, scale)
    assert all(tensor.isfinite().all() for tensor in (x, post, comb))


def test_what_is_not_finite_stays_in_its_token(device):
    fn, base, scale = parameters(4, 64, 3, device)
    for tokens in (1, 3):
        streams = numbers(tokens + 1, 4, 64).to(device)
        streams[tokens, 1, 5] = torch.nan
        for result in torch.ops.moe_mps.hyper_connection(streams, fn, base, scale)[:3]:
            assert result[tokens].isnan().all() and not result[:tokens].isnan().any()
