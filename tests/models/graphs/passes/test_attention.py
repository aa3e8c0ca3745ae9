"""Passes around attention: the rotation of a token, a gate. On their patterns, and with one thing changed."""

import pytest
import torch
from support.graphs import NO_CHAINS, assert_left, assert_needed, passes_of
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


# Of two rows, which see other keys; the second does not see the last.
SEEN = torch.tensor([[0, KEYS], [2, KEYS - 1]], dtype=torch.int32)
MASK = torch.tensor([[True, False, True], [True, True, False]]).repeat(1, 3)[:, None, None]
MASK_OF_HEADS = MASK.repeat(1, 6, 1, 1) & (torch.arange(6) != torch.arange(KEYS)[:, None]).T[:, None]
SINKS = random(6)


def repeated(cache: Tensor, count: int = 3) -> Tensor:
    return cache.repeat(1, count, 1, 1)


def repeats(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25)


def repeats_of_some_keys(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, key_range=SEEN, softcap=5.0)


def repeats_of_masked_keys(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, attn_mask=MASK)


def repeats_of_keys_that_a_head_sees(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, attn_mask=MASK_OF_HEADS)


def repeats_of_each_head(q, keys, values):
    keys, values = (cache.repeat_interleave(3, 1) for cache in (keys, values))
    return ops.cached_attention(q, keys, values, scale=0.25)


def repeats_in_other_counts(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values[:, :1], 6), scale=0.25)


def repeats_of_tokens(q, keys, values):
    keys, values = (cache.repeat(1, 3, 2, 1) for cache in (keys, values))
    return ops.cached_attention(q, keys, values, scale=0.25)


def repeats_of_a_window(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, window=4)


def repeats_beside_sinks(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, sinks=SINKS)


def repeats_before_a_write(q, keys, values):
    several = repeated(keys)
    keys[:, :, -1].fill_(1.0)
    return ops.cached_attention(q, several, repeated(values), scale=0.25)


def repeats_in_another_shape(q, keys, values):
    keys, values = (cache.repeat(1, 3, 1, 1).view(2, 6, KEYS, WIDTH) for cache in (keys, values))
    return ops.cached_attention(
        q, keys.view(2, 3, 2 * KEYS, WIDTH), values.view(2, 3, 2 * KEYS, WIDTH), scale=0.25
    )


ONE, REPEATED = {"cached_attention": 1}, {"cached_attention": 1, "repeat": 2}
OF_REPEATS = {
    repeats: ONE,
    repeats_of_some_keys: ONE,
    repeats_of_masked_keys: ONE,
    repeats_of_keys_that_a_head_sees: REPEATED,
    repeats_of_each_head: ONE | {"clone": 2},
    repeats_in_other_counts: REPEATED,
    repeats_of_tokens: REPEATED,
    repeats_of_a_window: REPEATED,
    repeats_beside_sinks: REPEATED,
    repeats_before_a_write: REPEATED | {"fill_": 1},
    repeats_in_another_shape: REPEATED,
}


@pytest.mark.parametrize("function", OF_REPEATS, ids=lambda function: function.__name__)
def test_repeated_keys(function):
    caches = [random(2, KEY_HEADS, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    assert_left(OF_REPEATS[function], function, random(2, 3 * KEY_HEADS, 1, WIDTH), *caches, tolerance=2e-6)


def test_repeated_keys_of_two_tokens():
    caches = [random(2, KEY_HEADS, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    assert_left(REPEATED, repeats, random(2, 3 * KEY_HEADS, 2, WIDTH), *caches)


@pytest.mark.parametrize("left_out", passes_of("attention"), ids=lambda each: each.__name__)
def test_each_pass_is_needed(left_out):
    caches = [random(2, KEY_HEADS, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    cases = [
        (function, (random(2, 3 * KEY_HEADS, 1, WIDTH), *caches), left)
        for function, left in OF_REPEATS.items()
    ]
    assert_needed(left_out, cases)
