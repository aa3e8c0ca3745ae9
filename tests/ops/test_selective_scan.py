"""Mamba-1's selective scan, for prompts and single tokens."""

import numpy as np
import pytest
import torch
from support.ops.pending import Steps
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import checked
from support.values import numbers

from torch_moe_mps.ops.families.selective_scan import selective_scan_


def scanned(batch, tokens, channels, states, dtype, seed=0):
    """x, step, B, C, state, A_log."""
    x, step = (numbers(batch, tokens, channels, dtype=dtype, seed=seed + i) for i in range(2))
    b, c = (numbers(batch, tokens, states, dtype=dtype, seed=seed + i) for i in range(2))
    return [
        x,
        step,
        b,
        c,
        numbers(batch, channels, states, seed=seed),
        numbers(channels, states, dtype=dtype),
    ]


def test_a_selective_scan_in_pieces(device):
    """Wherever it is cut, results and state have the same bits; without tokens nothing changes."""
    x, step, b, c, state, a_log = (each.to(device) for each in scanned(2, 70, 6, 16, torch.float32))
    expected = None
    for sizes in ([70], [1, 69], [32, 32, 6], [31, 0, 34, 5]):
        own, results = state.clone(), []
        for part in zip(*(each.split(sizes, 1) for each in (x, step, b, c)), strict=True):
            results.append(selective_scan_(*part, own, a_log))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("channels", [6, 150])
def test_tokens_of_a_selective_scan_that_are_pending(device, channels):
    """Whichever of them hold, results and states have the bits that these give one by one.

    On a CPU torch's exp rounds the last elements of a tensor in another way.
    """
    dtype, tolerance = (torch.float16, 0.0) if device == "mps" else (torch.float32, 1e-5)
    *of_tokens, state, a_log = (t.to(device) for t in scanned(2, 16, channels, 5, dtype))
    gate, bias = numbers(2, 4, 4, channels, dtype=dtype).to(device), numbers(channels).to(device)
    tokens, options = [*(t.unflatten(1, (4, 4)) for t in of_tokens), gate], {"dt_bias": bias}

    def call(states, step, rows, tokens_of_step, **pending):
        taken = slice(0, tokens_of_step) if isinstance(tokens_of_step, int) else tokens_of_step
        *inputs, z = (each[rows, step, taken] for each in tokens)
        return selective_scan_(*inputs, *states, a_log, gate=z, **options, **pending)

    pending = torch.full((2, -(-channels // 128), 5, 256 + 5), float("nan"), device=device)
    Steps(device).check([state], pending, call, tolerance)


def test_pending_tokens_of_a_selective_scan_without_further_ones(device):
    x, step, b, c, state, a_log = (t.to(device) for t in scanned(1, 3, 130, 16, torch.float32))
    pending, right = torch.zeros(1, 2, 8, 272, device=device), state.clone()
    two, none = (torch.tensor([[n]], dtype=torch.int32, device=device) for n in (2, 0))
    selective_scan_(x[:, :2], step[:, :2], b[:, :2], c[:, :2], right, a_log)
    selective_scan_(x, step, b, c, state, a_log, pending_=pending, counts=none, keep=True)
    empty = (tensor[:, :0] for tensor in (x, step, b, c))
    out = selective_scan_(*empty, state, a_log, pending_=pending, counts=two)
    assert out.shape == (1, 0, 130) and torch.equal(state, right)


@pytest.mark.parametrize(
    ("shape", "keep", "message"),
    [
        ((1, 1, 8, 272), False, "of 2 groups of channels with 272 elements for a token, got 1 with 272"),
        ((1, 2, 8, 271), False, "got 2 with 271"),
        ((1, 2, 2, 272), True, "pending_ must be of T = 3 tokens or more, got 2"),
    ],
)
def test_pending_tokens_of_other_sizes(shape, keep, message):
    counts = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"selective_scan_: .*{message}"):
        selective_scan_(
            *scanned(1, 3, 130, 16, torch.float32), pending_=torch.zeros(shape), counts=counts, keep=keep
        )


def test_selective_scan_of_extreme_numbers(device):
    """Steps that forget everything and that keep everything; NaN and infinity stay in their channel."""
    arguments = scanned(1, 4, 3, 5, torch.float32)
    arguments[1] = torch.tensor([200.0, -200.0, 0.0, 90.0]).view(1, 4, 1).expand(1, 4, 3).contiguous()
    arguments = [each.to(device) for each in arguments]
    checked("selective_scan_", *arguments)
    arguments[0][0, 1, 0], arguments[4][0, 2, 3] = float("nan"), float("inf")
    arguments[1][:] = 0.0
    finite = selective_scan_(*arguments).isfinite().cpu()[0]
    assert finite[0, :2].all() and not finite[1:, 0].any() and finite[:, 1].all() and not finite[:, 2].any()


def test_the_steps_of_a_selective_scan(device):
    """Of a token that writes into an empty state: log(1 + exp(x)) to a few roundings of x, however small."""
    x = torch.linspace(-60.0, 60.0, 1201)
    one, state = torch.ones(1, 1, 1, device=device), torch.zeros(1, len(x), 1, device=device)
    step = x.view(1, 1, -1).to(device)
    selective_scan_(torch.ones_like(step), step, one, one, state, torch.zeros(len(x), 1, device=device))
    right = np.logaddexp(0.0, exact(x))
    assert (abs(exact(state).ravel() - right) <= 2 * (2 + abs(exact(x))) * FLOAT32_EPS * right).all()
