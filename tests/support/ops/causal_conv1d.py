"""Operators of the family causal_conv1d: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch

from support import oracles_sequence
from support.ops import wrong
from support.ops.pending import pending
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import Expected


def draw_causal_conv1d_update_(d):
    batch, channels, tokens, width = d.one(1, 2, 0), d.one(6, 1, 65, 0), d.one(1, 3, 8, 0), d.one(4, 1, 2, 0)
    dtype, room = d.dtype(), d.one(0, 1, 3)
    return {
        "x": d.values(batch, tokens, channels, dtype=dtype),
        "conv_state_": d.values(batch, channels, max(0, width - 1) + room),
        "weight": d.values(channels, width),
        **pending(d, tokens, (batch, channels), (), dtype),
    }


def expected_causal_conv1d_update_(a):
    before = oracles_sequence.positions_taken_in(a)
    rest = before, a.weight, a.bias, a.activation
    value, magnitude, kept = oracles_sequence.convolution(a.x.transpose(1, 2), *rest)
    pending = [] if a.pending_ is None else [Expected(exact(a.pending_))]
    if a.keep:
        kept, pending[0].value[..., : a.x.shape[1]] = before, exact(a.x).swapaxes(1, 2)
    value, magnitude = (np.swapaxes(each, 1, 2) for each in (value, magnitude))
    if a.add_input:
        value, magnitude = value + exact(a.x), magnitude + abs(exact(a.x))
    return [Expected(value, 24 * FLOAT32_EPS * magnitude), Expected(kept), *pending]


def invalid_causal_conv1d_update_(zeros):
    kept = {"counts": zeros(2, 1, dtype=torch.int32), "keep": True}
    return [
        wrong("of W - 1 = 3 positions or more, got 2", conv_state_=zeros(2, 6, 2)),
        wrong("keep must be False without pending_, got True", keep=True),
        wrong("pending_ must be of T = 3 tokens or more, got 2", pending_=zeros(2, 6, 2), **kept),
    ]
