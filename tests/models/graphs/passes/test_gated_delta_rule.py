"""Passes around linear attention: its gates, its norm, and its state in place."""

import pytest
import torch
from support.graphs import TOKEN, H, assert_left, assert_needed, name_of, passes_of
from support.values import numbers as random
from torch.nn.functional import softplus

ops = torch.ops.moe_mps


HEADS, WIDTH = 2, 32


DECAY, BIAS, HEAD_NORM = random(HEADS).exp(), random(HEADS), random(WIDTH)


def gated_delta_rule(x, r, state):
    """The gates in front of a delta rule, the norm behind it, and the state that its cache takes back."""
    q, k, v, z = (x.view(1, 1, HEADS, WIDTH) * n for n in range(1, 5))
    beta = r[..., HEADS : 2 * HEADS].sigmoid()
    held = state.clone()
    out = ops._gated_delta_rule_(q, k, v, decay(r[..., :HEADS]), held, scale=0.25, beta=beta)
    state.copy_(held)
    normed = ops.rms_norm_gated(out.reshape(-1, WIDTH), z.reshape(-1, WIDTH), HEAD_NORM, norm_eps=1e-6)
    return normed.view(1, 1, -1)


def _updated(x, state):
    q, held = x.view(1, 1, HEADS, WIDTH), state.clone()
    strengths = x[..., :HEADS]
    return ops._gated_delta_rule_(q, q, q, strengths, held, scale=0.25, beta=strengths), held


def read_before_it_is_back(x, r, state):
    out, held = _updated(x, state)
    last = state * 2
    state.copy_(held)
    return out, last


def changed_when_it_is_back(x, r, state):
    """The state that the cache keeps is not the one that changes."""
    out, held = _updated(x, state)
    state.copy_(held)
    ops._gated_delta_rule_(out, out, out, x[..., :HEADS], held, scale=0.25, beta=x[..., :HEADS])
    return held * 2


COPIED = {"clone": 1, "copy_": 1, "_gated_delta_rule_": 1}


@pytest.mark.parametrize(
    "function,left",
    [
        (gated_delta_rule, {"mul": 4, "_gated_delta_rule_": 1}),
        (read_before_it_is_back, COPIED | {"mul": 1}),
        (changed_when_it_is_back, COPIED | {"_gated_delta_rule_": 2, "mul": 1}),
    ],
)
def test_gated_delta_rule(function, left):
    state = random(1, HEADS, WIDTH, WIDTH)
    assert_left(left, function, random(1, 1, H), random(1, 1, H, seed=1), state)


def decay(a):
    return -DECAY.exp() * softplus(a.float() + BIAS)


@pytest.mark.parametrize("left_out", passes_of("gated_delta_rule"), ids=name_of)
def test_each_pass_is_needed(left_out):
    """Without it, a pattern above is not found."""
    assert_needed(
        left_out,
        [
            (
                gated_delta_rule,
                (*TOKEN, random(1, HEADS, WIDTH, WIDTH)),
                {"mul": 4, "_gated_delta_rule_": 1},
            )
        ],
    )
