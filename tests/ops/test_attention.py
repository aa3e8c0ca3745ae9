"""Attention over a cache: a block of queries over chunks of keys."""

import numpy as np
import pytest
import torch
from support.oracles import exact
from support.oracles_experts import dequantise
from support.oracles_operators import checked
from support.sweep import in_sweep
from support.values import DTYPES, EACH_DTYPE, far_apart, numbers

from torch_moe_mps.ops.families.attention import _cached_attention
from torch_moe_mps.ops.families.attention import cached_attention as attend
from torch_moe_mps.quantization import quantize


def tensors(device, dtype, batch, heads, key_heads, tokens, keys, width, value_width=None):
    q = numbers(batch, heads, tokens, width, dtype=dtype, seed=1)
    k = numbers(batch, key_heads, keys, width, dtype=dtype, seed=2)
    v = numbers(batch, key_heads, keys, value_width or width, dtype=dtype, seed=3)
    return [t.to(device) for t in (q, k, v)]


def in_8_bits(device, groups, **caches):
    """Keys or values as arguments."""
    arguments = {}
    for (name, cache), group in zip(caches.items(), groups, strict=True):
        parts = [t.view(*cache.shape[:3], -1) for t in quantize(cache.cpu().flatten(0, 1), 8, group)]
        arguments |= dict(zip((name, f"{name}_scales", f"{name}_zeros"), parts, strict=True))
    return {name: tensor.to(device) for name, tensor in arguments.items()}


@pytest.mark.parametrize("dtype", in_sweep(DTYPES, [torch.bfloat16]))
def test_8_bits(device, dtype):
    """Groups of all sizes, keys and values of different ones; views of longer caches."""
    for heads, key_heads, tokens, keys, width, value_width, groups in (
        (8, 1, 1, 70, 64, 64, (64, 64)),
        (6, 2, 2, 40, 192, 128, (32, 128)),
        (4, 1, 3, 20, 256, 256, (128, 32)),
        (3, 1, 1, 9, 512, 512, (64, 64)),
    ):
        q, k, v = tensors("cpu", dtype, 1, heads, key_heads, tokens, keys + 5, width, value_width)
        caches = {name: part[:, :, 5:] for name, part in in_8_bits(device, groups, k=k, v=v).items()}
        options = {"window": 30, "dtype": "float32"}
        assert (
            checked("_cached_attention", q.to(device), scale=0.2, **caches, **options).dtype == torch.float32
        )


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_what_kernels_count_in_32_bits_may_lie_further_apart(device, dtype):
    """Scales and zeros of two heads of keys, rows of a mask."""
    q, k, v = tensors("cpu", dtype, 1, 4, 2, 2, 20, 32)
    caches = in_8_bits(device, (32, 32), k=k, v=v)
    groups = far_apart(torch.stack((caches["k_scales"], caches["k_zeros"])), 2)
    q, k, v = (tensor.to(device) for tensor in (q, k, v))
    checked("cached_attention", q, scale=0.2, **caches | {"k_scales": groups[0], "k_zeros": groups[1]})
    mask = numbers(1, 1, 2, 20) > 0.0
    checked("cached_attention", q, k, v, scale=0.2, attn_mask=far_apart(mask.to(device), 2))


@pytest.fixture
def one_core(simulated):
    """Plans for a GPU of one core, which few blocks of queries fill."""
    before = torch.ops.moe_mps._plan_for(1)
    yield simulated
    torch.ops.moe_mps._plan_for(before)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"window": 20, "softcap": 3.0}),
        (torch.float16, {"lookahead": 2**40, "sinks": True}),
        (torch.bfloat16, {"gate": True, "key_range": True}),
    ],
    ids=["causal", "window", "all keys", "gate and range"],
)
def test_prompts_that_fill_the_gpu(one_core, dtype, options):
    """Blocks of 32 queries: heads that share keys, odd widths and tokens, a window, ranges, sinks, a gate."""
    for heads, key_heads, tokens, keys, width, value_width, kernel in (
        (8, 4, 37, 150, 64, 64, "attention32_64"),
        (3, 3, 33, 70, 128, 100, "attention32_128"),
        (6, 3, 50, 40, 72, 127, "attention32_128"),
    ):
        q, k, v = tensors("mps", dtype, 1, heads, key_heads, tokens, keys, width, value_width)
        given = dict(options)
        if "sinks" in given:
            given["sinks"] = numbers(heads).to("mps")
        if "gate" in given:
            given["gate"] = numbers(1, tokens, heads, value_width, dtype=dtype).to("mps")
        if "key_range" in given:
            given["key_range"] = torch.tensor([[5, keys - 3]], dtype=torch.int32, device="mps")
        with one_core.trace() as commands:
            checked(
                "_cached_attention" if "gate" in given else "cached_attention", q, k, v, width**-0.5, **given
            )
        assert any(kernel in str(command) for command in commands), kernel


@pytest.mark.parametrize("masked", [False, True])
def test_float32_and_masks_have_no_blocks_of_32_queries(one_core, masked):
    dtype = torch.bfloat16 if masked else torch.float32
    q, k, v = tensors("mps", dtype, 1, 8, 4, 40, 40, 64)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool, device="mps").tril() if masked else None
    with one_core.trace() as commands:
        checked("cached_attention", q, k, v, scale=0.125, attn_mask=mask)
    assert any("attention16_64" in str(command) for command in commands)


def test_more_tokens_than_keys(device):
    """The first tokens see no key: zeros, with and without a sink."""
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 5, 3, 16)
    for sinks in (None, numbers(2).to(device)):
        out = checked("cached_attention", q, k, v, scale=1.0, sinks=sinks)
        assert (exact(out[:, :2]) == 0.0).all()


def test_dispatches(simulated):
    """One for a window or a short cache, two where chunks are merged; none without a token."""
    for tokens, keys, window, count in (
        (1, 255, None, 1),
        (1, 256, None, 2),
        (2, 4000, 128, 1),
        (0, 9, 4, 0),
    ):
        q, k, v = tensors("mps", torch.float32, 1, 2, 1, tokens, keys, 16)
        with simulated.trace() as commands:
            attend(q, k, v, scale=1.0, window=window)
        assert len(commands) == count


# Ranges of keys ----------------------------------------------------------------------------------------

RANGES = [[7, 2**31 - 1], [-3, 40], [60, 61], [-(2**31), 2**31 - 1], [50, 20], [69, -1]]


def ranges(device, of=RANGES):
    return torch.tensor(of, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("window", [None, 12])
def test_ranges(device, dtype, window):
    """Each batch entry has its own; some go beyond the keys, some are empty. All other keys hold NaN."""
    for heads, tokens, width, sinks in ((4, 1, 64, True), (2, 20, 24, False)):
        q, k, v = tensors(device, dtype, len(RANGES), heads, 2, tokens, 70, width)
        for row, (first, end) in enumerate(RANGES):
            for cache in (k, v):
                cache[row, :, : max(first, 0)], cache[row, :, max(end, 0) :] = torch.nan, torch.nan
        sinks = numbers(heads).to(device) if sinks else None
        options = {"window": window, "key_range": ranges(device), "sinks": sinks, "softcap": 9.0}
        checked("cached_attention", q, k, v, scale=0.3, **options)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_ranges_of_a_long_cache(device, dtype):
    """Chunks before a range, after it, and those in which it ends; in 8 bits and in 16."""
    of = [[1000, 2**31 - 1], [0, 130], [1199, 1200]]
    q, k, v = tensors(device, dtype, 3, 2, 1, 2, 1200, 32)
    for caches in ({"k": k, "v": v}, in_8_bits(device, (32, 32), k=k, v=v)):
        checked("cached_attention", q, scale=0.3, key_range=ranges(device, of), **caches)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_keys_outside_of_a_range_are_not_read(simulated, dtype):
    """In one chunk, and in several."""
    for keys, of in ((200, [[150, 200], [0, 30]]), (640, [[600, 2**31 - 1], [0, 30]])):
        q, k, v = tensors("mps", dtype, 2, 4, 1, 1, keys, 64)
        read = bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3, key_range=ranges("mps", of))
        assert read == [sum(min(end, keys) - first for first, end in of) * 64 * dtype.itemsize] * 2


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
    dtype = torch.bfloat16 if kind == "lowest bfloat16" else torch.float16
    q, k, v = tensors(device, dtype, 2, 4, 2, 3, keys, 16)
    seen = torch.zeros(2, 1, 3, keys, dtype=torch.bool)
    for b, t in np.ndindex(2, 3):
        seen[b, 0, t, 5 * b : 20 + b + t] = True
    seen[1, 0, 1, 7:11] = False
    unseen = ~seen.any(2)[:, 0]
    for cache in (k, v):
        cache.masked_fill_(unseen[:, None, :, None].to(device), torch.nan)
    checked(
        "cached_attention",
        q,
        k,
        v,
        scale=0.3,
        attn_mask=as_kind(seen, kind).to(device),
        sinks=numbers(4).to(device),
    )


def bytes_read(simulated, tensors_of, buffers=(1, 2), **options) -> list[int]:
    """Bytes of keys and values that the kernel reads."""
    with simulated.counters() as dispatches:
        _cached_attention(**tensors_of, **options)
    return [dispatches[0].buffers[i].bytes_read for i in buffers]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_hidden_keys_are_not_read(simulated, dtype):
    q, k, v = tensors("mps", dtype, 1, 4, 1, 1, 640, 64)
    mask = (torch.arange(640) < 40).view(1, 1, 1, -1).to("mps")
    assert (
        bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3, attn_mask=mask)
        == [40 * 64 * dtype.itemsize] * 2
    )


@pytest.mark.parametrize("heads, tokens, width", [(8, 1, 64), (2, 4, 128), (8, 2, 256), (8, 1, 320)])
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_each_key_is_read_once(simulated, heads, tokens, width, dtype):
    """For all queries of its head, up to 16, or 8 where the head is wide; in chunks and in none."""
    for keys in (130, 520):
        q, k, v = tensors("mps", dtype, 1, 2 * heads, 2, tokens, keys, width)
        read = bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3)
        assert read == [k.nbytes, v.nbytes]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_keys_of_a_prompt(simulated, dtype):
    """Each block of queries reads the keys that one of its tokens sees, once."""
    q, k, v = tensors("mps", dtype, 1, 4, 1, 64, 64, 64)
    tokens = [4 * (block + 1) for block in range(16)]  # the keys of a block of 4 tokens x 4 heads
    assert (
        bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3) == [sum(tokens) * 64 * dtype.itemsize] * 2
    )
    windowed = [min(4 + 10 - 1, n) for n in tokens]
    read = bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3, window=10)
    assert read == [sum(windowed) * 64 * dtype.itemsize] * 2
    two_sided = [min(n + 5, 64) - max(n - 4 - 9, 0) for n in tokens]
    read = bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3, window=10, lookahead=5)
    assert read == [sum(two_sided) * 64 * dtype.itemsize] * 2


def test_indices_read_what_they_select(simulated):
    """Unselected keys may be anything, and are not read; nothing is selected in one row."""
    q, k, v = tensors("mps", torch.float32, 1, 8, 1, 2, 1000, 64)
    indices = torch.tensor([[[[3, 997, 1000, -1], [-1, -1, 2**31 - 1, -5]]]], dtype=torch.int32).to("mps")
    expected = attend(q, k, v, scale=0.3, indices=indices)
    assert not expected[:, 1].any()
    unread = torch.ones(1000, dtype=torch.bool)
    unread[[3, 997]] = False
    for cache in (k, v):
        cache[:, :, unread.to("mps")] = torch.nan
    assert torch.equal(attend(q, k, v, scale=0.3, indices=indices), expected)
    assert bytes_read(simulated, {"q": q, "k": k, "v": v}, scale=0.3, indices=indices) == [2 * 64 * 4] * 2
    strided = indices.repeat(1, 1, 1, 2)[..., ::2].transpose(2, 3).contiguous().transpose(2, 3)
    assert strided.stride(3) != 1
    both = torch.tensor([3, 997], dtype=torch.int32).to("mps").expand(1, 1, 2, 2)
    checked("cached_attention", q[:, :, :1], k[:, :, [3, 997]], v[:, :, [3, 997]], scale=0.3)
    assert attend(q, k, v, scale=0.3, indices=both).isfinite().all()


def test_a_token_reads_what_it_sees_of_a_tail(simulated):
    q, k, v = tensors("mps", torch.float32, 1, 8, 1, 1, 100, 64)
    _, k_tail, v_tail = tensors("mps", torch.float32, 1, 8, 1, 1, 50, 64)
    seen = {"window": 20, "tail_rate": 4, "position": 7}  # and so two keys of the tail
    options = seen | {"k_tail": k_tail, "v_tail": v_tail}
    expected = _cached_attention(q, k, v, scale=0.3, **options)
    for cache, unseen in (
        (k, slice(0, 80)),
        (v, slice(0, 80)),
        (k_tail, slice(2, 50)),
        (v_tail, slice(2, 50)),
    ):
        cache[:, :, unseen] = torch.nan
    assert torch.equal(_cached_attention(q, k, v, scale=0.3, **options), expected)
    read = bytes_read(simulated, {"q": q, "k": k, "v": v}, (1, 2, 7, 9), scale=0.3, **options)
    assert read == [20 * 64 * 4] * 2 + [2 * 64 * 4] * 2


def test_a_row_that_sees_nothing(device):
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 2, 40, 16)
    mask = torch.ones(1, 1, 2, 40, dtype=torch.bool, device=device)
    mask[:, :, 0] = False
    for sinks in (None, numbers(2).to(device)):
        out = attend(q, k, v, scale=1.0, attn_mask=mask, sinks=sinks)
        assert (exact(out[:, 0]) == 0.0).all() and out[:, 1].isfinite().all()


# Layouts and values ------------------------------------------------------------------------------------


def test_large_scores(device):
    """Differences far beyond the range of exp, all of one sign, and a sink that takes all."""
    q, k, v = tensors(device, torch.float32, 1, 2, 1, 1, 100, 16)
    for scale, sink in ((1e4, 0.0), (-1e4, 0.0), (1e-3, 1e5), (1.0, -torch.inf)):
        sinks = torch.full((2,), sink, device=device)
        out = checked("cached_attention", q, k, v, scale=scale, sinks=sinks)
        highest = exact(q)[0, :, 0] @ exact(k)[0, 0].T * scale
        if scale == 1e-3:
            assert (exact(out) == 0.0).all()
        elif abs(scale) == 1e4:
            chosen = exact(v)[0, 0, highest.argmax(1)]
            chosen[highest.max(1) < 0.0] = 0.0
            np.testing.assert_allclose(exact(out)[0, 0], chosen, rtol=1e-5)


def test_nan_stays_in_its_head(device):
    q, k, v = tensors(device, torch.float32, 1, 4, 2, 2, 40, 16)
    k[0, 1, 39, 3] = torch.nan  # seen by the last token only
    out = attend(q, k, v, scale=1.0)
    assert out[0, 1, 2:].isnan().all()
    assert out[0, 1, :2].isfinite().all() and out[0, 0].isfinite().all()


def test_torch_computes_what_it_has_on_a_cpu(monkeypatch):
    """Its results stay if they are finite: keys that no token sees may hold NaN, and rows may be empty."""
    finite, own = [], torch.nn.functional.scaled_dot_product_attention

    def spied(*args, **kwargs):
        out = own(*args, **kwargs)
        finite.append(bool(out.isfinite().all()))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    q, k, v = tensors("cpu", torch.bfloat16, 2, 8, 2, 3, 40, 16, 24)
    mask = numbers(2, 2, 3, 40, dtype=torch.bfloat16) > -0.5
    for options in (
        {},
        {"lookahead": 40},
        {"attn_mask": mask},
        {"attn_mask": torch.where(mask, 0.5, -torch.inf)},
    ):
        checked("cached_attention", q, k, v, scale=0.2, **options)
    checked("cached_attention", q[:, :, :1], k, v, scale=0.2)
    assert finite == [True] * 5
    sinks = numbers(8)
    for options in ({"window": 9}, {"softcap": 5.0}, {"sinks": sinks}):
        checked("cached_attention", q, k, v, scale=0.2, **options)
    assert len(finite) == 5
    mask[0, :, 1] = False
    mask[..., 7] = False
    k[:, :, 7], v[:, :, 7] = torch.nan, torch.inf
    out = checked("cached_attention", q, k, v, scale=0.2, attn_mask=mask)
    assert finite[5:] == [False] and out.isfinite().all() and (out[0, 1] == 0.0).all()


def test_the_same_bits_again(every_order, device):
    q, k, v = tensors(device, torch.float32, 1, 4, 1, 2, 1100, 24)
    results = [attend(q, k, v, scale=0.3).cpu() for _ in every_order()]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_keys_and_values_in_8_bits_are_read_once(simulated, dtype):
    """By all 8 queries of a head together, in one chunk and in several."""
    for keys in (200, 1000):
        q, *_ = tensors("mps", dtype, 1, 16, 2, 1, 1, 128)
        k, v = (torch.zeros(1, 2, keys, 32, dtype=torch.int32, device="mps") for _ in range(2))
        names = ("k_scales", "k_zeros", "v_scales", "v_zeros")
        groups = {name: torch.ones(1, 2, keys, 2, dtype=dtype, device="mps") for name in names}
        with simulated.counters() as dispatches:
            attend(q, k, v, scale=0.1, **groups)
        buffers = dispatches[0].buffers
        assert [buffers[i].bytes_read for i in (1, 2)] == [k.nbytes, v.nbytes]
        for index, tensor in zip((1, 2, 7, 8, 9, 10), (k, v, *groups.values()), strict=True):
            assert buffers[index].distinct_bytes_read == tensor.nbytes


# The cache in 8 bits ------------------------------------------------------------------------------------


def cache_of(states, tokens, group, device):
    """An empty cache for more tokens than the states have, in a part of larger memory."""
    batch, heads, _, width = states.shape
    memory = torch.full((batch, heads, tokens + 2, width // 4), -1, dtype=torch.int32)
    groups = [torch.full((batch, heads, tokens, width // group), 7.0, dtype=states.dtype) for _ in range(2)]
    return [memory.to(device)[:, :, 1:-1], *(tensor.to(device) for tensor in groups)]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(("width", "group"), [(32, 32), (192, 64), (128, 128), (576, 64)])
def test_a_cache_in_8_bits(device, dtype, width, group):
    """Numbers are off by half a step at most, and everything else in the cache stays as it is."""
    memory = numbers(2 * 5 * 3 * width + 1, dtype=dtype, scale=4.0).to(device)
    states = memory[1:].view(2, 5, 3, width).transpose(1, 2)  # not on 16 bytes
    cache = cache_of(states, 9, group, device)
    torch.ops.moe_mps._write_cache_quantized_(states, *cache, 2)
    values = dequantise(*(tensor.cpu() for tensor in cache), f"affine8_{group}")
    off = abs(values[:, :, 2:7] - exact(states)).reshape(2, 3, 5, -1, group).max(-1)
    step = exact(cache[1])[:, :, 2:7]
    assert (off <= 0.5 * step * (1 + 1e-4)).all()
    groups = exact(states).reshape(2, 3, 5, -1, group)
    assert (step <= (groups.max(-1) - groups.min(-1)) / 254 * (1 + torch.finfo(dtype).eps)).all()
    packed, scales, zeros = (tensor.cpu() for tensor in cache)
    for outside in (slice(0, 2), slice(7, 9)):
        assert (packed[:, :, outside] == -1).all()
        assert (scales[:, :, outside] == 7.0).all() and (zeros[:, :, outside] == 7.0).all()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_a_cache_in_8_bits_of_special_numbers(device, dtype):
    """A group of equal numbers is exact; one with a number that is not finite is NaN, and no other is."""
    states = numbers(1, 1, 4, 64, dtype=dtype)
    states[:, :, 0], states[:, :, 1] = 0.3, 0.0
    states[0, 0, 2, 5], states[0, 0, 3, 40] = float("inf"), float("nan")
    cache = cache_of(states, 4, 32, device)
    torch.ops.moe_mps._write_cache_quantized_(states.to(device), *cache, 0)
    with np.errstate(invalid="ignore"):
        values = dequantise(*(tensor.cpu() for tensor in cache), "affine8_32")[0, 0].reshape(4, 2, 32)
    assert (values[0] == exact(states)[0, 0, 0, 0]).all() and (values[1] == 0.0).all()
    assert np.isnan(values).any(-1).tolist() == [[False, False]] * 2 + [[True, False], [False, True]]
    assert np.isnan(values[2, 0]).all() and np.isnan(values[3, 1]).all()
