"""Operators of the family attention: valid arguments, results in float64, and invalid arguments."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import oracles, oracles_sequence
from support.ops import wrong
from support.ops.rope import draw__rope_cache_, expected__rope_cache_
from support.oracles import FLOAT32_EPS, exact
from support.oracles_experts import dequantise
from support.oracles_operators import Expected
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._sample import T

# Options that depend on each other: draw_* gives all that is no required tensor.
WHOLE = ("cached_attention", "_cached_attention")
STEP = (
    "gate",
    "gate_activation",
    "k_tail",
    "v_tail",
    "tail_rate",
    "position",
    "dtype",
)  # of the latter alone


def draw_cache(d, name: str, shape: tuple[int, ...], dtype: torch.dtype, quantised: bool) -> dict:
    """Keys or values [B, Hk, S, D]."""
    if not quantised:
        return {name: d.values(*shape, dtype=dtype)}
    batch, heads, keys, width = shape
    form = f"affine8_{32 if width % 64 else d.one(32, 64)}"
    tensors = d.quantized(batch * heads, keys, width, form, dtype, d.seed + width)
    packed, scales, zeros = (t.view(batch, heads, keys, -1) for t in tensors)
    packed = packed.view(torch.int32) if d.flag() else packed
    return {name: packed, f"{name}_scales": scales, f"{name}_zeros": zeros}


def key_range(d, batch: int, keys: int) -> Tensor:
    numbers = (0, keys, 1, keys // 2, -1, -(2**31), 2**31 - 1)
    return torch.tensor([[d.one(*numbers), d.one(*numbers)] for _ in range(batch)]).int().view(batch, 2)


def draw_mask(d, batch: int, key_heads: int, tokens: int, keys: int) -> Tensor:
    """[B or 1, Hk or 1, T, S] of booleans or numbers that are added, or [.., .., T, ceil(S / 32)] of bits."""
    rows = d.one(1, batch), d.one(1, key_heads), tokens
    shown = torch.rand(*rows, keys, generator=d.generator) < 0.7
    number = d.dtype()
    added = torch.randn(shown.shape, generator=d.generator).to(number)
    hidden = d.one(-math.inf, torch.finfo(number).min)
    bits = torch.randint(-(2**31), 2**31, (*rows, -(-keys // 32)), generator=d.generator).int()
    return d.one(shown, added.masked_fill(~shown, hidden), bits)


def draw_cached_attention(d):
    return {name: value for name, value in draw__cached_attention(d, False).items() if name not in STEP}


def draw__cached_attention(d, may_have_tail: bool = True):
    batch, key_heads, group = d.one(1, 2, 0), d.one(1, 2), d.one(1, 3, 8)
    tokens, keys = d.one(1, 2, 5, 0), d.one(9, 1, 40, 130, 0)
    width, value_width = d.one((64, 64), (24, 40), (7, 1), (96, 32))
    dtype, heads = d.dtype(), key_heads * group
    quantised = width % 32 == 0 and batch * keys > 0 and d.flag()
    mask = None
    kind = d.one("order", "mask", "indices", *["tail"] * may_have_tail)
    quantised = quantised and kind != "tail"
    if kind == "mask":
        mask = draw_mask(d, batch, key_heads, tokens, keys)
    lookahead = d.one(0, 3, 2**40) if kind == "order" else 0
    block = d.one(1, 1, 7, 32) if kind == "indices" else 1
    indices, tail = None, d.one(5, 1, 70, 0)
    if kind == "indices" or (kind == "tail" and d.flag()):
        shape = batch, d.one(1, key_heads), tokens, d.one(3, 1, 40, 0)
        most = keys // block if kind == "indices" else tail
        indices = torch.randint(-1, most + 2, shape, generator=d.generator).int()
    return {
        "q": d.values(batch, heads, tokens, width, dtype=dtype),
        **draw_cache(d, "k", (batch, key_heads, keys, width), dtype, quantised),
        **draw_cache(d, "v", (batch, key_heads, keys, value_width), dtype, quantised),
        "scale": d.one(width**-0.5, 1.0),
        "attn_mask": mask,
        "window": d.one(None, 1, 4, 128) if kind in ("order", "tail") else None,
        "lookahead": lookahead,
        "key_range": None if kind != "order" else d.maybe(lambda: key_range(d, batch, keys)),
        "indices": indices,
        "index_block": block,
        "softcap": d.one(None, 2.0),
        "sinks": d.maybe(lambda: d.values(heads)),
        "gate": d.maybe(lambda: d.values(batch, tokens, heads, d.one(1, value_width), dtype=dtype)),
        "gate_activation": d.one("sigmoid", "softplus"),
        **(tail_of(d, (batch, key_heads, tail), (width, value_width), dtype) if kind == "tail" else {}),
        "dtype": d.one(None, dtype_name(dtype), "float32"),
    }


def tail_of(d, shape: tuple[int, ...], widths: tuple[int, int], dtype) -> dict[str, Any]:
    names = zip(("k_tail", "v_tail"), widths, strict=True)
    tail = {name: d.values(*shape, width, dtype=dtype) for name, width in names}
    return {**tail, "tail_rate": d.one(4, 1, 128), "position": d.one(30, 0, 3, 5000)}


def draw__write_cache_quantized_(d):
    batch, heads, tokens, width = d.one(1, 2, 0), d.one(1, 2), d.one(1, 3, 0), d.one(64, 32, 192)
    room, group, dtype = tokens + d.one(2, 0, 5), d.one(32, 64 if width % 64 == 0 else 32), d.dtype()
    packed = torch.randint(-(2**31), 2**31, (batch, heads, room, width // 4), generator=d.generator)
    groups = (batch, heads, room, width // group)
    return {
        "states": d.values(batch, heads, tokens, width, dtype=dtype),
        "packed_": packed.int(),
        "scales_": d.values(*groups, dtype=dtype),
        "zeros_": d.values(*groups, dtype=dtype),
        "start": d.one(*range(room - tokens + 1)),
    }


def draw__rope_attention_(d):
    arguments = draw__rope_cache_(d)
    while arguments["q"] is None or arguments["v"] is None:
        arguments = draw__rope_cache_(d)
    arguments.pop("k_bias")  # of keys alone
    arguments.pop("v_norm_factor")  # of latents
    (batch, tokens, _, width), dtype = arguments["q"].shape, arguments["q"].dtype
    key_heads, value_width, keys = d.one(1, 2), d.one(16, 6, 64), tokens + d.one(1, 0, 40, 300)
    heads = key_heads * d.one(1, 3, 9)
    shapes = {"q": (heads, width), "k": (key_heads, width), "v": (key_heads, value_width)}
    held = {"keys_": width, "values_": value_width}
    arguments |= {n: d.values(batch, tokens, *shape, dtype=dtype) for n, shape in shapes.items()}
    arguments |= {n: d.values(batch, key_heads, keys, size, dtype=dtype) for n, size in held.items()}
    return arguments | {
        "v_norm_weight": d.maybe(lambda: d.values(value_width)) if arguments["norm_v"] else None,
        "scale": width**-0.5,
        "window": d.one(None, 1, 128),
        "key_range": d.maybe(lambda: key_range(d, batch, keys)),
        "softcap": d.one(None, 2.0),
        "gate": d.maybe(lambda: d.values(batch, tokens, heads, d.one(1, value_width), dtype=dtype)),
    }


def cached(values, scales, zeros) -> tuple[np.ndarray, np.ndarray]:
    """Keys or values, and the magnitudes of what they are made of."""
    if scales is None:
        return exact(values), abs(exact(values))
    group = values.shape[3] * 4 // scales.shape[3]
    number = dequantise(values, scales, torch.zeros_like(zeros), f"affine8_{group}")
    bias = np.repeat(exact(zeros), group, -1)
    return number + bias, abs(number) + abs(bias)


def with_tail(a, seen: np.ndarray) -> np.ndarray:
    """How often a token sees the keys, [1, T, S], and those of the tail: [B, Hk or 1, T, S + N]."""
    batch, _, tokens, _ = a.q.shape
    shape = (batch, 1, tokens) if a.indices is None else a.indices.shape[:3]
    of_tail = np.zeros((*shape, a.k_tail.shape[2]))
    for place in np.ndindex(*shape):
        complete = min((a.position + place[2] + 1) // a.tail_rate, of_tail.shape[3])
        selected = range(complete) if a.indices is None else a.indices[place].tolist()
        for key in selected:
            if 0 <= key < complete:
                of_tail[place][key] += 1
    return np.concatenate((np.broadcast_to(seen[:, None], (*shape, seen.shape[-1])), of_tail), -1)


def expected_cached_attention(a):
    return expected__cached_attention(SimpleNamespace(**vars(a), **dict.fromkeys(STEP)))


def expected__cached_attention(a):
    tokens, keys = a.q.shape[2], a.k.shape[2]
    added = 0.0
    if a.indices is not None and a.k_tail is None:
        seen = np.zeros((*a.indices.shape[:3], keys))
        for place in np.ndindex(*a.indices.shape):
            first = a.indices[place].item() * a.index_block
            if first >= 0:
                seen[place[:3]][first : first + a.index_block] += 1
    elif a.attn_mask is None:
        seen = oracles_sequence.causal(tokens, keys, a.window, a.key_range, a.lookahead)
    elif a.attn_mask.dtype == torch.bool:
        seen = a.attn_mask.numpy()
    elif a.attn_mask.dtype == torch.int32:
        seen = np.unpackbits(a.attn_mask.numpy().view(np.uint8), axis=-1, bitorder="little")[..., :keys]
    else:
        seen = (a.attn_mask > torch.finfo(a.attn_mask.dtype).min).numpy()
        added = np.where(seen, exact(a.attn_mask), 0.0)
    k, k_size = cached(a.k, a.k_scales, a.k_zeros)
    v, v_size = cached(a.v, a.v_scales, a.v_zeros)
    if a.k_tail is not None:
        seen = with_tail(a, seen)
        k, v = (np.concatenate((x, exact(t)), 2) for x, t in ((k, a.k_tail), (v, a.v_tail)))
        k_size, v_size = abs(k), abs(v)
    options = (a.sinks, a.scale, seen, added, a.softcap, (k_size, v_size))
    value, error = oracles_sequence.attention(a.q, k, v, *options)
    if a.gate is not None:
        x = exact(a.gate)
        factor = np.logaddexp(0.0, x) if a.gate_activation == "softplus" else oracles.sigmoid(x)
        # An exponential's error is absolute in what it is added to.
        value, error = value * factor, error * factor + abs(value) * 8 * FLOAT32_EPS * factor
    return [Expected(value, error)]


def expected__write_cache_quantized_(a):
    rows = slice(a.start, a.start + a.states.shape[2])
    packed, scales, zeros = a.packed_.view(torch.int32).numpy().copy(), exact(a.scales_), exact(a.zeros_)
    known = np.ones(packed.shape, bool)
    right = [Expected(packed, known=known), Expected(scales, 0.0), Expected(zeros, 0.0)]
    if a.states.numel() == 0:
        return right
    groups = exact(a.states).reshape(*a.states.shape[:3], scales.shape[3], -1)
    low, high = groups.min(-1), groups.max(-1)
    scales[:, :, rows], zeros[:, :, rows] = ((high - low) / 254, low)
    nearest = [
        oracles.round_to((high - low) / 254 * (1 + off), a.scales_.dtype)[..., None]
        for off in (-4 * FLOAT32_EPS, 4 * FLOAT32_EPS)
    ]
    codes = [np.where(s > 0, (groups - low[..., None]) / np.where(s > 0, s, 1), 0.0) for s in nearest]
    least, most = (
        np.minimum(np.rint(c * (1 + off)), 255) for c, off in zip(codes, (-1e-5, 1e-5), strict=True)
    )
    width = a.states.shape[3]
    words = least.astype(np.uint8).reshape(*a.states.shape[:3], width).view(np.int32)
    packed[:, :, rows] = words
    known[:, :, rows] = (least == most).reshape(*words.shape, 4).all(-1)
    return right


def expected__rope_attention_(a):
    """What `_rope_cache_` rounds may be a neighbour of what is rounded here."""
    turned, keys, values = expected__rope_cache_(SimpleNamespace(**vars(a), k_bias=None, v_norm_factor=1.0))
    q, k, v = (oracles.round_to(each.value, a.q.dtype) for each in (turned, keys, values))
    named = dict(
        zip(
            ("q", "k", "v"),
            (torch.from_numpy(each).to(a.q.dtype) for each in (q, k, v)),
            strict=True,
        )
    )
    none = ("attn_mask", "indices", "k_tail", "k_scales", "k_zeros", "v_scales", "v_zeros")
    (out,) = expected__cached_attention(SimpleNamespace(**vars(a) | named | dict.fromkeys(none), lookahead=0))
    errors = (oracles.spacing(x, a.q.dtype) + each.error for x, each in ((q, turned), (k, keys), (v, values)))
    q_error, k_error, v_error = (np.broadcast_to(e, x.shape) for e, x in zip(errors, (q, k, v), strict=True))
    group = q.shape[1] // k.shape[1]
    k, k_error, v, v_error = (np.repeat(x, group, 1) for x in (k, k_error, v, v_error))
    scores = np.einsum("bhtd,bhsd->bhts", q_error, abs(k)) + np.einsum("bhtd,bhsd->bhts", abs(q), k_error)
    moved = (
        np.expm1(2 * a.scale * scores.max(-1, initial=0.0))[..., None]
        * abs(v).max((2, 3), initial=0.0)[..., None, None]
        + v_error.max((2, 3), initial=0.0)[..., None, None]
    )
    factor = 1.0 if a.gate is None else np.logaddexp(0.0, exact(a.gate))
    return [Expected(out.value, out.error + moved.transpose(0, 2, 1, 3) * factor), keys, values]


def invalid__rope_attention_(zeros):
    return [
        wrong("k must be of a number of heads that divides Hq = 3, got (2, 3, 2, 16)", q=zeros(2, T, 3, 16))
    ]


def invalid_cached_attention(zeros):
    scales = zeros(2, 2, 9, 1)
    eight_bits = {
        **{"q": zeros(2, 4, T, 32), "k_scales": scales, "k_zeros": scales},
        **{"v": zeros(2, 2, 9, 8, dtype=torch.int32), "v_scales": scales, "v_zeros": scales},
    }
    mask = zeros(1, 1, T, 9)
    indices = zeros(2, 1, T, 4, dtype=torch.int32)
    return [
        wrong("v's head dimension must be between 1 and 512, got 513", v=zeros(2, 2, 9, 513)),
        wrong("between 1 and 1024", index_block=0, indices=indices),
        wrong("1 without indices", index_block=2),
        wrong("None beside indices, which hold it", window=4, indices=indices),
        wrong("None beside indices, which hold it", attn_mask=mask, indices=indices),
        wrong("0 beside a mask or indices, which hold it", lookahead=1, attn_mask=mask),
        wrong("0 beside a mask or indices, which hold it", lookahead=1, indices=indices),
        wrong("above 0 and finite", softcap=0.0),
        wrong(
            "k_scales must be of a last dimension of 16 / 32 or 64 or 128",
            k=zeros(2, 2, 9, 4, dtype=torch.int32),
            **eight_bits,
        ),
    ]


def invalid__cached_attention(zeros):
    beside = {"k_tail": zeros(2, 2, 5, 16), "v_tail": zeros(2, 2, 5, 8)}
    indices = zeros(2, 1, T, 4, dtype=torch.int32)
    return [
        *invalid_cached_attention(zeros),
        wrong("k_tail must be None unless keys and values have a tail", k_tail=zeros(2, 2, 5, 16)),
        wrong("v_tail must be None unless keys and values have a tail", v_tail=zeros(2, 2, 5, 8)),
        wrong("lookahead must be 0 beside a tail, got 1", lookahead=1, **beside),
        wrong("position must be between 0 and 2147483644, got -1", **beside, position=-1),
        wrong("index_block must be between 1 and 1 beside a tail", index_block=2, **beside, indices=indices),
    ]


def invalid__write_cache_quantized_(zeros):
    return [
        wrong("of a last dimension of 64 / 32 or 64 or 128", scales_=zeros(2, 2, T + 5, 4)),
        wrong("between 0 and 5", start=6),
        wrong("between 0 and 5", start=-1),
    ]
