"""Operators of the family selective_scan: valid arguments and results in float64."""

import torch

from support import oracles_sequence
from support.ops.pending import pending
from support.oracles import FLOAT32_EPS
from support.oracles_operators import Expected


def draw_selective_scan_(d):
    batch, channels, tokens, states = d.one(1, 2, 0), d.one(6, 1, 130, 0), d.one(1, 3, 33, 0), d.one(16, 1, 5)
    x, groups = d.values(batch, tokens, channels), -(-channels // 128)
    held = pending(d, tokens, (batch, groups), (256 + states,), torch.float32)
    if held["pending_"] is not None:
        held["pending_"].abs_()  # steps are not negative
    return {"x": x, "B": d.values(batch, tokens, states, dtype=x.dtype), **held}


def expected_selective_scan_(a):
    result, state, *magnitudes, pending = oracles_sequence.selective_scan(a)
    error = (32 + 4 * (a.x.shape[1] + 8 * (pending is not None))) * FLOAT32_EPS
    expected = zip((result, state), (error * m for m in magnitudes), strict=True)
    rows = [] if pending is None else [Expected(pending, 8 * FLOAT32_EPS * (1.0 + abs(pending)))]
    return [*(Expected(*each) for each in expected), *rows]
