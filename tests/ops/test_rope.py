"""Rotary position embedding with the norms of the heads."""

import torch
from support.values import numbers

from torch_moe_mps.ops.families.rope import rope, rope_heads

EPS = 1e-6
FLOAT32_ERRORS = 16


def tables(batch, tokens, width, dtype=torch.float32, seed=0):
    """Tables that differ from those of a model: the two elements of a pair have different entries."""
    return numbers(batch, tokens, width, dtype=dtype, seed=seed), numbers(
        batch, tokens, width, dtype=dtype, seed=seed + 1
    )


def test_inputs_are_read_where_they_lie(simulated):
    """One dispatch, no copy, and only what belongs to q and k is read, once."""
    qkv = numbers(2, 3, 96, dtype=torch.float16).to("mps")
    q, k = qkv[..., :64].view(2, 3, 4, 16), qkv[..., 64:80].view(2, 3, 1, 16)
    cos, sin = (t.to("mps") for t in tables(1, 3, 16, torch.float16))
    with simulated.counters() as dispatches:
        rope(q, k, cos, sin)
    (dispatch,) = dispatches
    of_qkv = [dispatch.buffers[i].bytes_read for i in (0, 1, 2) if i in dispatch.buffers]  # one buffer
    assert sum(of_qkv) == 2 * (q.numel() + k.numel())


def test_nan_stays_in_its_head(device):
    q = numbers(1, 2, 3, 16).to(device)
    q[0, 1, 2, 5] = torch.nan
    cos, sin = (t.to(device) for t in tables(1, 2, 16))
    for weight, count in ((None, 2), (torch.ones(16, device=device), 16)):
        out = rope_heads(q, cos, sin, weight)
        assert out.isnan().sum() == count == out[0, 2, 1].isnan().sum()
