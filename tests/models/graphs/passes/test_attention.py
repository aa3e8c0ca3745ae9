"""Passes around attention: the rotation of a token, a gate. On their patterns, and with one thing changed."""

import pytest
import torch
from support.graphs import NO_CHAINS, assert_left
from support.values import numbers as random
from torch import Tensor

ops = torch.ops.moe_mps
HEADS, KEY_HEADS, WIDTH, KEYS = 4, 2, 16, 9
COUNT = HEADS + 2 * KEY_HEADS

COS, SIN, NORM = random(1, 1, WIDTH), random(1, 1, WIDTH, seed=1), random(WIDTH)


def turned(x: Tensor, keys: Tensor, values: Tensor, place: slice = slice(KEYS - 1, KEYS)) -> Tensor:
    q, k, v = x.unflatten(-1, (COUNT, WIDTH)).split((HEADS, KEY_HEADS, KEY_HEADS), 2)
    held = keys[:, :, place], values[:, :, place]
    return ops._rope_cache_(q, k, v, *held, COS, SIN, NORM, NORM)


def attend(x, keys, values):
    return ops.cached_attention(
        turned(x, keys, values), keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25, window=5
    )


def a_gate(x, keys, values):
    out = ops.cached_attention(turned(x, keys, values), keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25)
    return out * torch.sigmoid(x[..., : HEADS * WIDTH].view(1, 1, HEADS, WIDTH))


def another_place(x, keys, values):
    q = turned(x, keys, values, slice(KEYS - 2, KEYS - 1))
    return ops.cached_attention(q, keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25)


def queries_that_else_are_read(x, keys, values):
    q = turned(x, keys, values)
    return ops.cached_attention(q, keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25), q * 2


def a_cache_that_is_read_between(x, keys, values):
    q = turned(x, keys, values)
    last = keys[:, :, KEYS - 1 : KEYS].exp()
    return ops.cached_attention(q, keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25), last


def a_mask(x, keys, values):
    mask = torch.ones(1, 1, 1, KEYS, dtype=torch.bool).tril()
    return ops.cached_attention(
        turned(x, keys, values), keys[:, :, :KEYS], values[:, :, :KEYS], scale=0.25, attn_mask=mask
    )


def other_keys(x, keys, values):
    return ops.cached_attention(turned(x, keys, values), values[:, :, :KEYS], values[:, :, :KEYS], scale=0.25)


ONE, TWO = {"_rope_attention_": 1}, {"_rope_cache_": 1, "cached_attention": 1}
LEFT = {
    attend: ONE,
    a_gate: ONE,
    another_place: TWO,
    queries_that_else_are_read: TWO | {"mul": 1},
    a_cache_that_is_read_between: TWO | {"exp": 1},
    a_mask: TWO | {"ones": 1, "tril": 1},
    other_keys: TWO,
}


@pytest.mark.parametrize("function", LEFT, ids=lambda function: function.__name__)
def test_what_is_left(function):
    caches = [random(1, KEY_HEADS, KEYS + 3, WIDTH, seed=seed) for seed in (3, 4)]
    assert_left(LEFT[function], function, random(1, 1, COUNT * WIDTH), *caches, without=NO_CHAINS)


def test_a_gate_is_read_where_it_lies():
    """As a query's matrix makes query and gate of each head: its copies only make it contiguous."""

    def function(q, k, g):
        wide = g.view(1, 1, 4, 32)[..., 16:]
        out = ops.cached_attention(q, k, k, scale=0.25)
        return out.reshape(1, 1, 64) * torch.sigmoid(wide.reshape(1, 1, 64))

    inputs = random(1, 4, 1, 16), random(1, 1, 9, 16), random(1, 1, 128)
    assert_left({"_cached_attention": 1}, function, *inputs, without=NO_CHAINS)
