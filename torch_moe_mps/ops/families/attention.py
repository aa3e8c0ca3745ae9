"""Attention over a cache of keys and values, and writing such a cache in 8 bits."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._weight_formats import GROUP_SIZES
from .._checks import NAMED_DTYPES, PACKED_DTYPES, Check, wide, wide_dtype
from .._formats import Format, dequantize_values, pack
from .._registry import door, operator
from .._sample import Calls, Changes, Sample, whole_groups
from .rope import PAIRS, WRITTEN, _rope_cache_, check_rope_cache

MAX_HEAD = 576  # elements of a query and a key
MAX_VALUE_HEAD = 512
CACHE_BITS = 8  # bits of quantised keys and values
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
MAX_INDEX_BLOCK = 1024  # keys of an index
MAX_POSITION = 2**31 - 1
WORD = 32  # keys of a mask of bits
SCALES = ("k_scales", "k_zeros", "v_scales", "v_zeros")


def _check_mask(check: Check, mask: Tensor, q: Tensor, k: Tensor) -> None:
    (batch, _, tokens, _), (_, key_heads, keys, _) = q.shape, k.shape
    is_bits = mask.dtype == torch.int32
    expected = (batch, key_heads, tokens, -(-keys // WORD) if is_bits else keys)
    fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, key_heads)
    if not fits or tuple(mask.shape[2:]) != expected[2:]:
        last = "ceil(S / 32)" if is_bits else "S"
        shape = f"[B or 1, Hk or 1, T, {last}], with B, Hk, T, {last} = {expected}"
        check.fail("attn_mask", f"of shape {shape}", tuple(mask.shape))


def _check_indices(check: Check, indices: Tensor | None, block: int, **others: object) -> None:
    if indices is None:
        if block != 1:
            check.fail("index_block", "1 without indices", block)
        return
    check.none("beside indices, which hold it", True, **others)
    check.between("index_block", block, 1, MAX_INDEX_BLOCK)


def _check_quantized(
    check: Check, names: tuple[str, str, str], packed: Tensor, scales: Tensor | None, zeros: Tensor | None
) -> int:
    """The elements of a quantised head. `names` name the three tensors."""
    check.dtype(names[0], packed, PACKED_DTYPES)
    columns = packed.shape[3] * 32 // CACHE_BITS
    for name, tensor in zip(names[1:], (scales, zeros), strict=True):
        if tensor is None:
            check.fail(name, f"a tensor beside quantised {names[0]}", None)
        groups = tensor.shape[3]
        if groups < 1 or columns % groups or columns // groups not in GROUP_SIZES["affine"]:
            sizes = " or ".join(map(str, GROUP_SIZES["affine"]))
            check.fail(name, f"of a last dimension of {columns} / {sizes}", tuple(tensor.shape))
    assert scales is not None and zeros is not None
    check.shape(names[2], zeros, tuple(scales.shape), f"of {names[1]}")
    return columns


def _check_keys(check: Check, q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, ...]) -> int:
    """The elements of a head of values."""
    heads, width = check.dims("Hq D")
    key_columns, value_width = width, v.shape[3]
    if all(tensor is None for tensor in scales):
        check.dtype("k", k, (q.dtype,))
        check.dtype("v", v, (q.dtype,))
    else:
        key_columns = width * CACHE_BITS // 32
        columns = _check_quantized(check, ("k", "k_scales", "k_zeros"), k, *scales[:2])
        if columns != width:
            check.fail("k", f"of {key_columns} words a key, for D = {width}", tuple(k.shape))
        value_width = _check_quantized(check, ("v", "v_scales", "v_zeros"), v, *scales[2:])
    check.shape("k", k, (*k.shape[:3], key_columns), "[B, Hk, S, D]")
    if heads % k.shape[1]:
        check.fail("k", f"of a number of heads that divides Hq = {heads}", tuple(k.shape))
    check.between("v's head dimension", value_width, 1, MAX_VALUE_HEAD)
    return value_width


def _check_tailed(
    check: Check, q: Tensor, indices: Tensor | None, lookahead: int, index_block: int, position: int
) -> None:
    """Refuses options that attention with a tail of entries lacks."""
    if lookahead != 0:
        check.fail("lookahead", "0 beside a tail", lookahead)
    check.between("position", position, 0, MAX_POSITION - q.shape[2])
    _check_indices(check, indices, index_block)
    check.between("index_block", index_block, 1, 1, " beside a tail")


def _meta_cached_attention(check, q, k, v, attn_mask, indices, k_tail, v_tail, lookahead, gate, **given):
    """The checked output [B, T, Hq, Dv] of attention of a step."""
    value_width = _check_keys(check, q, k, v, tuple(given[name] for name in SCALES))
    if attn_mask is not None:
        _check_mask(check, attn_mask, q, k)
    if k_tail is None or v_tail is None:
        check.none("unless keys and values have a tail", True, k_tail=k_tail, v_tail=v_tail)
        order = {name: given[name] for name in ("window", "key_range")}
        _check_indices(check, indices, given["index_block"], attn_mask=attn_mask, **order)
    else:
        _check_tailed(check, q, indices, lookahead, given["index_block"], given["position"])
    if lookahead > 0 and not (indices is None and attn_mask is None):
        check.fail("lookahead", "0 beside a mask or indices, which hold it", lookahead)
    softcap, dtype = given["softcap"], given["dtype"]
    if softcap is not None and not 0.0 < softcap < math.inf:
        check.fail("softcap", "above 0 and finite", softcap)
    if gate is not None and gate.shape[3] != 1:
        check.shape("gate", gate, (*gate.shape[:3], value_width), "[B, T, Hq, Dv or 1]")
    wanted = q.dtype if dtype is None else NAMED_DTYPES[dtype]
    wider = () if q.dtype == torch.float32 else (torch.float32,)
    check.among_dtypes("dtype", wanted, (q.dtype, *wider))
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], value_width), dtype=wanted)


def seen_in_order(
    tokens: int,
    keys: int,
    end: int,
    window: int | None,
    key_range: Tensor | None,
    device: torch.device,
    lookahead: int = 0,
) -> Tensor:
    """[B or 1, 1, T, S], True where a token sees a key; the last of the T tokens is the key before `end`."""
    k = torch.arange(keys, device=device)
    distance = torch.arange(end - tokens, end, device=device)[:, None] - k
    before = distance >= -lookahead
    seen = (before if window is None else before & (distance < window))[None, None]
    if key_range is not None:
        first, last = key_range[:, :, None, None, None].unbind(1)
        seen = seen & (k >= first) & (k < last)
    return seen


def _times_selected(indices: Tensor, block: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[B, Hk or 1, T, S]: how often the indices select a key."""
    rows = indices.long().unsqueeze(-1) * block + torch.arange(block, device=indices.device)
    exists = (indices >= 0).unsqueeze(-1) & (rows < keys)
    rows = torch.where(exists, rows, keys).flatten(3)
    times = torch.zeros((*indices.shape[:3], keys + 1), dtype=dtype, device=indices.device)
    return times.scatter_add_(3, rows, torch.ones_like(rows, dtype=dtype))[..., :keys]


def _seen_of_tail(
    indices: Tensor | None, tokens: int, keys: int, rate: int, position: int, like: Tensor
) -> Tensor:
    """Summand of the scores of a tail's keys, [B or 1, Hk or 1, T, N] in the dtype of `like`."""
    limits = (torch.arange(position + 1, position + tokens + 1, device=like.device) // rate)[:, None]
    seen = _added((torch.arange(keys, device=like.device) < limits)[None, None])
    return seen if indices is None else _times_selected(indices, 1, keys, like.dtype).log_() + seen


def bits_as_bool(mask: Tensor, keys: int) -> Tensor:
    """[..., S] bool of a mask of bits, [..., ceil(S / 32)] int32."""
    k = torch.arange(keys, device=mask.device)
    packed = mask.index_select(-1, k // WORD)  # nobody asks for their count while a token is captured
    return torch.bitwise_right_shift(packed, (k % WORD).int()) & 1 != 0


def _added(mask: Tensor) -> Tensor:
    """Summand of the scores, [B or 1, Hk or 1, T, S]: -inf where a token sees no key."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return wide(mask).masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def values_in(cache: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Tensor:
    """Keys or values in float32 or float64."""
    if scales is None:
        return wide(cache)
    group = cache.shape[3] * 32 // CACHE_BITS // scales.shape[3]
    return dequantize_values(cache, scales, zeros, Format(CACHE_BITS, group))


def _by_torch(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor | None:
    """[B, T, Hq, Dv] by torch's attention in the dtype of keys; None where a number is not finite.

    What hidden keys hold reaches its results as NaN.
    """
    (batch, heads, tokens, width), (key_heads, width_of_values) = q.shape, values.shape[1::2]
    group = heads // key_heads
    rows = wide(q).reshape(batch, key_heads, group * tokens, width)
    if tokens > 1:
        bias = bias.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias.to(rows.dtype), scale=scale)
    if not out.isfinite().all():
        return None
    return out.reshape(batch, heads, tokens, width_of_values).transpose(1, 2)


@operator(
    f"q[B, Hq, T, D<={MAX_HEAD}] k[B, Hk>=1, S, _]:any v[B, Hk, S, Dv]:any attn_mask[_, _, T, _]:mask "
    "key_range[B, 2]:int32 sinks[Hq] indices[B, 1, T, K]|[B, Hk, T, K]:int32 k_scales[B, Hk, S, _]:q "
    "k_zeros[B, Hk, S, _]:q v_scales[B, Hk, S, _]:q v_zeros[B, Hk, S, _]:q gate[B, T, Hq, _]:q "
    "k_tail[B, Hk, N, D]:k v_tail[B, Hk, N, Dv]:v",
    _meta_cached_attention,
    allowed={
        **{"window": 1, "lookahead": 0},
        **{"gate_activation": tuple(GATES), "tail_rate": range(1, MAX_POSITION + 1)},
    },
    dependences=(
        "attn_mask key_range k_scales not beside k_tail (beside a tail)",
        "window key_range not beside attn_mask (beside a mask, which holds it)",
    ),
)
def _cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    lookahead: int = 0,
    key_range: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    index_block: int = 1,
    k_scales: Tensor | None = None,
    k_zeros: Tensor | None = None,
    v_scales: Tensor | None = None,
    v_zeros: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "sigmoid",
    k_tail: Tensor | None = None,
    v_tail: Tensor | None = None,
    tail_rate: int = 1,
    position: int = 0,
    dtype: str | None = None,
) -> Tensor:
    """`cached_attention` with what models join to it in one dispatch. Private: it may change in any release.

    out *= gate_activation(gate), where there is a gate

    Args:
        q, k, v, scale, attn_mask, window, lookahead, key_range, softcap, sinks, indices,
            index_block, k_scales, k_zeros, v_scales, v_zeros: as for `cached_attention`.
        gate: [B, T, Hq, Dv], or [B, T, Hq, 1] for all values of a head, in the dtype of `q`; any strides.
        gate_activation: "sigmoid" or "softplus".
        k_tail, v_tail: [B, Hk, N, D] and [B, Hk, N, Dv] in the dtype of `q`, strides free: further
            keys and values, each of which stands for `tail_rate` neighbouring tokens, as DeepSeek-V4
            compresses them. A token sees a key of the tail if it comes after all of these tokens or is the
            last of them, and the same keys of `k` as without a tail. `indices`, if there are some, select
            keys of the tail and not of `k`. Not beside a mask, a `key_range`, or keys of 8 bits.
        tail_rate: at least 1.
        position: the number of tokens before the new ones. New token t sees the first
            (position + t + 1) // tail_rate keys of the tail, however many of them `k` still holds.
        dtype: of the result: "float32", or the name of the dtype of `q` (also None).

    Returns: [B, T, Hq, Dv] in `dtype`. A token that sees no key gets zeros.

    Raises: ValueError for a dtype, shape, window, lookahead, softcap, activation or device that does not fit.
    """
    tokens, keys = q.shape[2], k.shape[2]
    keys_, values = values_in(k, k_scales, k_zeros), values_in(v, v_scales, v_zeros)
    own = (window, key_range, softcap, sinks, indices, k_tail)
    is_torchs = q.is_cpu and all(option is None for option in own)
    if indices is not None and k_tail is None:
        bias = _times_selected(indices, index_block, keys, wide_dtype(q)).log_()
    else:
        mask = attn_mask
        if mask is None:
            mask = seen_in_order(tokens, keys, keys, window, key_range, q.device, lookahead)
        elif mask.dtype == torch.int32:
            mask = bits_as_bool(mask, keys)
        bias = _added(mask)
    if k_tail is not None and v_tail is not None:
        seen = _seen_of_tail(indices, tokens, k_tail.shape[2], tail_rate, position, keys_)
        shape = torch.broadcast_shapes(bias.shape[:3], seen.shape[:3])
        bias = torch.cat((bias.expand(*shape, -1), seen.expand(*shape, -1)), 3)
        keys_, values = torch.cat((keys_, wide(k_tail)), 2), torch.cat((values, wide(v_tail)), 2)
    out = _by_torch(q, keys_, values, bias, scale) if is_torchs else None
    if out is None:
        out = _attended(q, keys_, values, bias, scale, softcap, sinks)
    if gate is not None:
        out = out * GATES[gate_activation](wide(gate))
    return out.to(q.dtype if dtype is None else NAMED_DTYPES[dtype])


@door(_cached_attention, public="attention over a KV cache in any model")
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    lookahead: int = 0,
    key_range: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    index_block: int = 1,
    k_scales: Tensor | None = None,
    k_zeros: Tensor | None = None,
    v_scales: Tensor | None = None,
    v_zeros: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention over a KV cache, with windows, sinks, soft caps and sparse keys.

    score[s] = cap(scale * q . k[s]) + attn_mask[s]
    cap(x) = softcap * tanh(x / softcap) where it is given
    out = sum_s exp(score[s]) * v[s] / (exp(sink) + sum_s exp(score[s])), without sinks: no exp(sink)

    For one new token over a long cache, for a few, and for a prompt: no tensor of T x S is made. Keys and
    values are read once for all the queries of a key head while these are up to 16 (8 where the values have
    more than 256 elements), and once more for each further block of as many. Query head h reads key head
    h // (Hq / Hk). Arithmetic is in float32, rounded once; the same input gives the same bits.

    Args:
        q: [B, Hq, T, D], float32, float16 or bfloat16, D up to 576.
        k: [B, Hk, S, D] in the dtype of `q`; Hk divides Hq. Strides are free: a slice of a cache is
            read where it lies.
        v: [B, Hk, S, Dv] in the dtype of `q`, Dv up to 512. A value that is infinite or NaN may give
            NaN to tokens of the call that do not see it, as it does in torch's attention.
        scale: of the scores.
        attn_mask: [B or 1, Hk or 1, T, S], bool (True: the token sees the key) or one of the three dtypes,
            which is added; -inf or the lowest number of its dtype hides a key. Or [.., .., T, ceil(S / 32)]
            int32, a bit for each key, the lowest bit first: 1 where the token sees it. Keys that no
            token sees are not read. Without a mask the new tokens are the last T of S; each sees itself and
            what lies before it.
        window: how many keys a token sees at most up to its own, which is included; None beside a mask,
            which holds it.
        lookahead: how many keys after its own a token sees, too: S or more for all of them, 0 beside a mask
            or indices. An encoder's window of w keys on both sides is `window=w + 1, lookahead=w`.
        key_range: [B, 2] int32: the first key that the tokens of a batch entry may see, and the one behind
            the last; order and window hold as well. Keys outside are not read. Numbers below 0 mean 0, those
            above S mean S. None beside a mask.
        softcap: above 0 and finite.
        sinks: [Hq], any of the three dtypes: a logit for each head that takes part in the softmax and has no
            value.
        indices: [B, Hk or 1, T, K] int32: the only keys that a token sees, in any order, whatever its own
            place is; they are all that is read. An index that is no key hides, which reads nothing: -1 fills
            a row up. One that occurs twice counts twice. None beside attn_mask, window and key_range.
        index_block: so many neighbouring keys are selected by an index, i * index_block and those behind it.
        k_scales, k_zeros: [B, Hk, S, D / group] in the dtype of `q`, for keys of 8 bits in groups of
            32, 64 or 128 along the head, as `torch_moe_mps.quantization.quantize` makes them in mode
            "affine". Then `k` is [B, Hk, S, D / 4] int32 or uint32.
        v_scales, v_zeros: the same for the values, which are quantised where the keys are.

    Returns: [B, T, Hq, Dv] in the dtype of `q`. A token that sees no key gets zeros.

    Raises: ValueError for a dtype, shape, window, lookahead, softcap or device that does not fit.

    Example:
        >>> q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)  # two new tokens, three keys
        >>> v = torch.tensor([0.0, 2.0, 4.0]).view(1, 1, 3, 1)
        >>> ops.cached_attention(q, k, v, scale=0.5).flatten().tolist()
        [1.0, 2.0]
    """
    return inspect.unwrap(_cached_attention)(**locals())


def _attended(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, T, Hq, Dv] in float32 or float64. What hidden keys and values hold has no effect."""
    (batch, heads, tokens, width), key_heads = q.shape, keys.shape[1]
    queries = wide(q).reshape(batch, key_heads, heads // key_heads, tokens, width) * scale
    bias = bias.unsqueeze(2)
    hidden = bias == -torch.inf
    logits = torch.matmul(queries, keys.unsqueeze(2).transpose(-1, -2))
    if softcap is not None:
        logits = (logits / softcap).tanh_() * softcap
    logits = (logits + bias).masked_fill(hidden, -torch.inf)  # a hidden key may hold NaN
    sink = logits.new_full((heads,), -torch.inf) if sinks is None else sinks.to(logits.dtype)
    sink = sink.expand(batch, tokens, heads).mT.reshape(*queries.shape[:4], 1)
    # Without any key and sink the softmax is NaN.
    probabilities = torch.cat((logits, sink), -1).softmax(-1)[..., :-1].masked_fill(hidden, 0.0)
    values = values.masked_fill(hidden.all(3).squeeze(2).unsqueeze(-1), 0.0)
    out = torch.matmul(probabilities, values.unsqueeze(2))
    return out.reshape(batch, heads, tokens, values.shape[3]).transpose(1, 2)


# One token's heads, rotated and written into the cache


def _meta_rope_attention(check, q, k, v, keys_, values_, **given):
    rotated = check_rope_cache(check, q, k, v, keys_, values_, **given)
    if q.shape[2] % k.shape[2]:
        check.fail("k", f"of a number of heads that divides Hq = {q.shape[2]}", tuple(k.shape))
    none = dict.fromkeys((*SCALES, "attn_mask", "indices", "k_tail", "v_tail", "dtype"))
    return _meta_cached_attention(check, rotated, keys_, values_, **none, index_block=1, lookahead=0, **given)


@operator(
    f"q[B, T, Hq>=1, D<={MAX_HEAD}] k[B, T, Hk>=1, D]:q v[B, T, Hk, Dv<={MAX_VALUE_HEAD}]:q "
    "keys_[B, Hk, S, D]:q values_[B, Hk, S, Dv]:q cos[A, T, W] sin[A, T, W]:cos q_norm_weight[D] "
    "k_norm_weight[D] v_norm_weight[Dv] key_range[B, 2]:int32 sinks[Hq] gate[B, T, Hq, _]:q",
    _meta_rope_attention,
    allowed={"pairs": PAIRS, "gate_activation": tuple(GATES), "window": 1},
    dependences=WRITTEN,
)
def _rope_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys_: Tensor,
    values_: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    *,
    pairs: str = "half",
    rotary_dim: int | None = None,
    rotary_last: bool = False,
    norm_v: bool = False,
    v_norm_weight: Tensor | None = None,
    window: int | None = None,
    key_range: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "sigmoid",
) -> Tensor:
    """`_rope_cache_`, then `_cached_attention` of its queries to the caches that it has written. Private.

    For one token behind up to 4,096 keys, on Metal, both are one dispatch (and a merge, for many keys) if a
    block has all queries of a key head, up to 16, and the inputs can be read as vectors.

    Args:
        q, k, v, keys_, values_, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset, pairs,
            rotary_dim, rotary_last, norm_v, v_norm_weight: as for `_rope_cache_`.
        scale, window, key_range, softcap, sinks, gate, gate_activation: as for `_cached_attention`.

    Returns: [B, T, Hq, Dv] in the dtype of `q`, contiguous.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.
    """
    norms = q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset
    rotated = _rope_cache_(
        *(q, k, v, keys_, values_, cos, sin, *norms),
        pairs=pairs,
        rotary_dim=rotary_dim,
        rotary_last=rotary_last,
        norm_v=norm_v,
        v_norm_weight=v_norm_weight,
    )
    return _cached_attention(
        rotated,
        keys_,
        values_,
        scale=scale,
        window=window,
        key_range=key_range,
        softcap=softcap,
        sinks=sinks,
        gate=gate,
        gate_activation=gate_activation,
    )


# The cache in 8 bits


def _check_write(check, states, packed_, scales_, zeros_, start):
    width = _check_quantized(check, ("packed_", "scales_", "zeros_"), packed_, scales_, zeros_)
    check.shape("states", states, (*states.shape[:3], width), "[B, Hk, T, D]")
    check.between("start", start, 0, packed_.shape[2] - states.shape[2])


@operator(
    "states[B, Hk, T, _] packed_[B, Hk, N, _]:packed scales_[B, Hk, N, _]:states zeros_[B, Hk, N, _]:states "
    "-> packed_ scales_ zeros_",
    _check_write,
)
def _write_cache_quantized_(
    states: Tensor,
    packed_: Tensor,
    scales_: Tensor,
    zeros_: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises keys or values of new tokens to 8 bits, into a cache as `cached_attention` reads it.

        bias = the lowest number of a group; scale = (the highest - bias) / 254, rounded to the dtype
        code = min(round((x - bias) / scale), 255), 0 where scale is 0

    With 254, `scale` may be rounded down: a number is off by half of `scale` at most. A group with a number
    that is not finite has NaN for both, and codes of 0.

    Args:
        states: [B, Hk, T, D], float32, float16 or bfloat16; any strides.
        packed_: [B, Hk, N, D / 4] int32 or uint32: the codes; written in place, whatever its strides.
        scales_, zeros_: [B, Hk, N, D / group] in the dtype of `states`, for groups of 32, 64 or 128; written
            in place. None of the three may overlap itself or another argument.
        start: the token of the cache that the first new one becomes, N - T at most.

    Returns: `packed_`, `scales_` and `zeros_`. `torch.ops.moe_mps` itself returns nothing.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    In models whose cache holds 8 bits.
    """
    if states.numel() == 0:
        return packed_, scales_, zeros_
    groups = wide(states).unflatten(-1, (scales_.shape[3], -1))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    not_finite = (groups * 0).sum(-1, keepdim=True)  # NaN if any number is, else 0
    bias = low + not_finite
    scale = wide(((high - low) / 254 + not_finite).to(states.dtype))
    codes = ((groups - low) / scale).round_().clamp_(max=255)
    codes = torch.where(scale > 0, codes, 0.0).to(torch.uint8)
    for target, new in (
        (packed_.view(torch.int32), pack(codes.flatten(-2), CACHE_BITS).view(torch.int32)),
        (scales_, scale.squeeze(-1).to(scales_.dtype)),
        (zeros_, bias.squeeze(-1).to(zeros_.dtype)),
    ):
        target[:, :, start : start + states.shape[2]] = new
    return packed_, scales_, zeros_


def _in_8_bits(s: Sample, tokens: int, keys: int, heads: int = 4) -> dict[str, Any]:
    arguments = {"q": s.values(2, heads, tokens, whole_groups(s.D))}
    for name, width in (("k", whole_groups(s.D)), ("v", whole_groups(s.V))):
        arguments[name] = s.codes(2, 2, keys, width // 4)
        arguments[f"{name}_scales"] = s.values(2, 2, keys, width // 32) / 128
        arguments[f"{name}_zeros"] = s.values(2, 2, keys, width // 32)
    return arguments


def _selected(s: Sample) -> Tensor:
    return torch.tensor([[[[8, 0, -1]] * s.T]] * 2, dtype=torch.int32, device=s.device)


def _more_attention(s: Sample) -> list[dict[str, Any]]:
    """Changes to the sample of `cached_attention` that take its other kernels."""
    selected = _selected(s)
    return [
        {"sinks": None, "window": 4, "softcap": 20.0},
        {"window": 4, "key_range": torch.tensor([[3, 9], [0, 7]], dtype=torch.int32, device=s.device)},
        s.of("q[2, 4, 9, D]", window=3, lookahead=2),
        s.of("attn_mask[2, 1, T, 9]"),
        {"attn_mask": s.values(1, 1, s.T, 9) > 0.0},
        {"attn_mask": s.integers(512, 2, 2, s.T, 1, dtype=torch.int32)},
        {"indices": selected},
        s.of("q[2, 36, T, D]", indices=selected, sinks=None),
        {"indices": selected, **_in_8_bits(s, s.T, 9)},
        {"indices": selected, **_in_8_bits(s, s.T, 9, 36), "sinks": None},
        s.of("q[2, 4, 20, D] k[2, 2, 300, D] v[2, 2, 300, V]"),
        s.of("q[1, 32, 1, D] k[1, 2, 9, D] v[1, 2, 9, V]", sinks=None),
        _in_8_bits(s, s.T, 9),
        _in_8_bits(s, 20, 300),
    ]


def _more_steps(s: Sample) -> list[dict[str, Any]]:
    """Changes to the sample of `_cached_attention`: gates, tails, 8 bits."""
    selected = _selected(s)
    compressed = s.of("k_tail[2, 2, 6, D] v_tail[2, 2, 6, V]", tail_rate=2, position=7)
    one_gate = {"gate": s.values(2, s.T, 4, 1), "gate_activation": "softplus"}
    return [
        s.of("attn_mask[2, 1, T, 9] gate[2, T, 4, V]", dtype="float32"),
        {"attn_mask": s.values(1, 1, s.T, 9) > 0.0, **one_gate},
        s.of("q[2, 4, 20, D] k[2, 2, 300, D] v[2, 2, 300, V] gate[2, 20, 4, V]"),
        {"indices": selected, **one_gate},
        s.of("q[2, 36, T, D]", indices=selected, sinks=None),
        compressed,
        compressed | {"indices": selected, "position": 20},  # 8 is no key of the tail
        compressed | s.of("q[2, 36, T, D]", sinks=None),
        compressed | s.of("q[2, 36, T, D]", indices=selected, sinks=None, window=2),
        _in_8_bits(s, s.T, 9) | one_gate,
        _in_8_bits(s, 20, 300) | {"gate": s.values(2, 20, 4, whole_groups(s.V))},
        {"indices": selected, **_in_8_bits(s, s.T, 9), **one_gate},
        {"indices": selected, **_in_8_bits(s, s.T, 9, 36), "sinks": None},
    ]


def _attended_sample(s: Sample) -> dict[str, Any]:
    caches = f"k[2, 2, {s.T + 6}, D] v[2, 2, {s.T + 6}, V] sinks[4]"
    return s.of(caches, q=s.q.transpose(1, 2), scale=0.25)


def _written(s: Sample) -> dict[str, Any]:
    width = max(64, whole_groups(s.D))
    return {
        "states": s.values(2, 2, s.T, width),
        "packed_": torch.zeros(2, 2, s.T + 5, width // 4, dtype=torch.int32, device=s.device),
        "scales_": torch.zeros(2, 2, s.T + 5, width // 32, dtype=s.dtype, device=s.device),
        "zeros_": torch.zeros(2, 2, s.T + 5, width // 32, dtype=s.dtype, device=s.device),
        "start": 3,
    }


def rope_attention_sample(s: Sample, tokens: int, heads: int = 4, keys: int = 12) -> dict[str, Any]:
    """Good arguments of _rope_attention_."""
    states = f"q[2, {tokens}, {heads}, D] k[2, {tokens}, 2, D] v[2, {tokens}, 2, V] q_norm_weight[D]"
    caches = f"keys_[2, 2, {keys}, D] values_[2, 2, {keys}, V]"
    return s.of(f"{states} {caches} cos[1, {tokens}, D] sin[1, {tokens}, D]", scale=s.D**-0.5)


CALLS: Calls = {
    "_rope_attention_": lambda s: rope_attention_sample(s, s.T),
    "_cached_attention": _attended_sample,
    "cached_attention": _attended_sample,
    "_write_cache_quantized_": _written,
}
CHANGES: Changes = {
    "_rope_attention_": lambda s: [
        rope_attention_sample(s, 1, heads=18),
        rope_attention_sample(s, 1)
        | s.of(
            "k_norm_weight[D] v_norm_weight[V] sinks[4] gate[2, 1, 4, 1]", pairs="interleaved", norm_v=True
        )
        | {"window": 3, "softcap": 20.0},
    ],
    "_cached_attention": _more_steps,
    "cached_attention": _more_attention,
    "_write_cache_quantized_": lambda s: [
        {"states": s.values(2, s.T, 2, max(64, whole_groups(s.D))).transpose(1, 2)},
    ],
}
