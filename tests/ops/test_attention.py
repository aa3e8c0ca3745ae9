"""Attention with sinks."""

import numpy as np
import pytest
import torch
from support.oracles import exact, round_to, spacing
from support.oracles_sequence import attention, causal

from torch_moe_mps.ops.attention import attention_sinks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def assert_right(actual, q, k, v, sinks, scale, seen, added=0.0):
    """`seen`: [B or 1, T, S]."""
    value, errors = attention(q, k, v, sinks, scale, seen, added)
    assert tuple(actual.shape) == value.shape and actual.is_contiguous()
    correct = round_to(value, actual.dtype)
    assert (abs(exact(actual) - correct) <= spacing(correct, actual.dtype) + errors).all()


def tensors(device, dtype, batch, heads, key_heads, tokens, keys, width, value_width=None):
    q = random(batch, heads, tokens, width, dtype=dtype, seed=1)
    k = random(batch, key_heads, keys, width, dtype=dtype, seed=2)
    v = random(batch, key_heads, keys, value_width or width, dtype=dtype, seed=3)
    return [t.to(device) for t in (q, k, v)]


# (B, Hq, Hk, T, S, D, Dv, window)
SIZES = [
    (1, 8, 1, 1, 70, 64, 64, None),
    (2, 2, 2, 1, 33, 64, 64, 10),
    (1, 6, 2, 3, 40, 80, 80, None),
    (1, 5, 1, 2, 200, 128, 128, 128),
    (1, 2, 1, 8, 9, 192, 128, 4),
    (1, 2, 1, 1, 150, 256, 256, None),
    (2, 3, 1, 4, 4, 24, 40, None),
    (1, 2, 2, 2, 31, 7, 65, 1),
    (1, 1, 1, 1, 1, 1, 1, None),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(device, dtype):
    for i, (batch, heads, key_heads, tokens, keys, width, value_width, window) in enumerate(SIZES):
        q, k, v = tensors(device, dtype, batch, heads, key_heads, tokens, keys, width, value_width)
        sinks = None if i % 3 == 2 else random(heads, dtype=dtype if i % 2 else torch.float32).to(device)
        out = attention_sinks(q, k, v, sinks, width**-0.5, None, window)
        assert_right(out, q, k, v, sinks, width**-0.5, causal(tokens, keys, window))


def test_more_tokens_than_keys(device):
    """The first tokens see no key: zeros, with and without a sink."""
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 5, 3, 16)
    for sinks in (None, random(2).to(device)):
        out = attention_sinks(q, k, v, sinks, 1.0)
        assert (exact(out[:, :2]) == 0.0).all()
        assert_right(out, q, k, v, sinks, 1.0, causal(5, 3))


@pytest.mark.one_schedule
def test_a_prompt(device):
    q, k, v = tensors(device, torch.float16, 1, 4, 2, 37, 37, 32)
    sinks = random(4).to(device)
    assert_right(attention_sinks(q, k, v, sinks, 0.2), q, k, v, sinks, 0.2, causal(37, 37))


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(device, dtype):
    """Long caches are split, here into 5 and 6 chunks, the last of them shorter."""
    for keys, heads, tokens, window in ((1100, 2, 1, None), (1500, 3, 2, 1300)):
        q, k, v = tensors(device, dtype, 1, heads, 1, tokens, keys, 16)
        sinks = random(heads).to(device)
        out = attention_sinks(q, k, v, sinks, 0.5, None, window)
        assert_right(out, q, k, v, sinks, 0.5, causal(tokens, keys, window))


def test_dispatches(simulated):
    """One for a window or a short cache, two where chunks are merged; none without a token."""
    for tokens, keys, window, count in (
        (1, 1024, None, 1),
        (1, 1025, None, 2),
        (2, 4000, 128, 1),
        (0, 9, 4, 0),
    ):
        q, k, v = tensors("mps", torch.float16, 1, 2, 1, tokens, keys, 16)
        with simulated.trace() as commands:
            attention_sinks(q, k, v, None, 1.0, None, window)
        assert len(commands) == count


# Masks -------------------------------------------------------------------------------------------------


def as_kind(seen: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "bool":
        return seen
    dtype = {"-inf": torch.float32, "lowest float16": torch.float16, "lowest bfloat16": torch.bfloat16}[kind]
    hidden = -torch.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, hidden)


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest float16", "lowest bfloat16"])
@pytest.mark.parametrize("keys", [50, 1200])
def test_a_static_cache(device, kind, keys):
    """Slots that no token sees hold NaN: they are not read. Keys that only one token sees are its own."""
    q, k, v = tensors(device, torch.float16, 2, 4, 2, 3, keys, 16)
    seen = torch.zeros(2, 1, 3, keys, dtype=torch.bool)
    for b, t in np.ndindex(2, 3):
        seen[b, 0, t, 5 * b : 20 + b + t] = True
    seen[1, 0, 1, 7:11] = False
    unseen = ~seen.any(2)[:, 0]
    for cache in (k, v):
        cache.masked_fill_(unseen[:, None, :, None].to(device), torch.nan)
    sinks = random(4).to(device)
    out = attention_sinks(q, k, v, sinks, 0.3, as_kind(seen, kind).to(device))
    assert_right(out, q, k, v, sinks, 0.3, seen[:, 0].numpy())


def test_hidden_keys_are_not_read(simulated):
    q, k, v = tensors("mps", torch.float16, 1, 4, 1, 1, 640, 64)
    mask = torch.arange(640) < 40
    with simulated.counters() as dispatches:
        attention_sinks(q, k, v, None, 0.3, mask.view(1, 1, 1, -1).to("mps"))
    (dispatch,) = dispatches
    assert [dispatch.buffers[i].bytes_read for i in (1, 2)] == [2 * 40 * 64 * 2] * 2


def test_each_key_is_read_once_for_two_queries(simulated):
    for keys, heads in ((300, 2), (300, 8), (2000, 8)):
        q, k, v = tensors("mps", torch.bfloat16, 1, heads, 1, 1, keys, 64)
        with simulated.counters() as dispatches:
            attention_sinks(q, k, v, None, 0.3)
        assert [dispatches[0].buffers[i].bytes_read for i in (1, 2)] == [heads // 2 * keys * 64 * 2] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_masks(device, dtype):
    """A bias that is neither 0 nor hides; of one batch entry for all, strided."""
    q, k, v = tensors(device, torch.float32, 2, 2, 1, 2, 40, 16)
    mask = random(1, 1, 40, 2, dtype=dtype, scale=2.0).transpose(2, 3).to(device)
    added = exact(mask)[:, 0]
    seen = np.ones((1, 2, 40), dtype=bool)
    assert_right(attention_sinks(q, k, v, None, 0.3, mask), q, k, v, None, 0.3, seen, added)
    wide = torch.zeros(2, 1, 2, 64, dtype=dtype)
    wide[..., 3:43] = mask.cpu()
    view = wide.to(device)[..., 3:43]
    assert_right(attention_sinks(q, k, v, None, 0.3, view), q, k, v, None, 0.3, seen, added)


def test_a_row_that_sees_nothing(device):
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 2, 40, 16)
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool, device=device)
    mask[:, :, 0] = False
    for sinks in (None, random(2).to(device)):
        out = attention_sinks(q, k, v, sinks, 1.0, mask)
        assert (exact(out[:, 0]) == 0.0).all() and out[:, 1].isfinite().all()


# Layouts and values ------------------------------------------------------------------------------------


def test_strides(device):
    """Slices of caches of more heads, longer caches and wider rows; queries of a projection's view."""
    for width, start in ((16, 0), (16, 8), (16, 3), (13, 4)):
        cache = random(2, 5, 60, 40, dtype=torch.float16).to(device)
        k = cache[:, 1:3, 4:50, start : start + width]
        v = random(2, 46, 2, 16, dtype=torch.float16).to(device).transpose(1, 2)
        q = random(2, 2, 4 * width, dtype=torch.float16).to(device).view(2, 2, 4, width).transpose(1, 2)
        out = attention_sinks(q, k, v, None, 0.3)
        assert_right(out, q, k, v, None, 0.3, causal(2, 46))
    k = random(2, 2, 16, 46, dtype=torch.float16).to(device).transpose(2, 3)
    q, sinks = q[:, :, :, :1].expand(-1, -1, -1, 16), random(8).to(device)[::2]
    assert_right(attention_sinks(q, k, v, sinks, 0.3), q, k, v, sinks, 0.3, causal(2, 46))


def test_empty(device):
    for batch, tokens, keys in ((0, 1, 4), (1, 0, 4), (2, 1, 0)):
        q, k, v = tensors(device, torch.float16, batch, 4, 2, tokens, keys, 16)
        out = attention_sinks(q, k, v, None, 1.0)
        assert tuple(out.shape) == (batch, tokens, 4, 16) and (exact(out) == 0.0).all()


def test_large_scores(device):
    """Differences far beyond the range of exp, all of one sign, and a sink that takes all."""
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 1, 100, 16)
    for scale, sink in ((1e4, 0.0), (-1e4, 0.0), (1e-3, 1e5), (1.0, -torch.inf)):
        sinks = torch.full((2,), sink, device=device)
        out = attention_sinks(q, k, v, sinks, scale)
        highest = exact(q)[0, :, 0] @ exact(k)[0, 0].T * scale
        if scale == 1e-3:
            assert (exact(out) == 0.0).all()
        elif abs(scale) == 1e4:
            chosen = exact(v)[0, 0, highest.argmax(1)]
            chosen[highest.max(1) < 0.0] = 0.0
            np.testing.assert_allclose(exact(out)[0, 0], chosen, rtol=1e-5)
        else:
            assert_right(out, q, k, v, None, scale, causal(1, 100))


def test_nan_stays_in_its_head(device):
    q, k, v = tensors(device, torch.float32, 1, 4, 2, 2, 40, 16)
    k[0, 1, 39, 3] = torch.nan  # seen by the last token only
    out = attention_sinks(q, k, v, None, 1.0)
    assert out[0, 1, 2:].isnan().all()
    assert out[0, 1, :2].isfinite().all() and out[0, 0].isfinite().all()


def test_the_same_bits_again(every_order, device):
    q, k, v = tensors(device, torch.float32, 1, 4, 1, 2, 1100, 24)
    results = [attention_sinks(q, k, v, None, 0.3).cpu() for _ in every_order()]
    assert all(torch.equal(result, results[0]) for result in results)
