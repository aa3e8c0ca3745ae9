"""Operators of the family tiles: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch
from torch import Tensor

from support import oracles, oracles_sequence
from support.ops import wrong
from support.ops.attention import draw_mask, key_range
from support.oracles import FLOAT32_EPS, exact, round_to
from support.oracles_operators import Expected
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._sample import T

TILE = 128
WHOLE = ("_tiled_attention",)


def words_of_codes(width: int, bits: int) -> int:
    return TILE * width * bits // 32


def words_of(width: int, bits: int, dtype: torch.dtype, factors: bool) -> int:
    return words_of_codes(width, bits) + (2 * width + TILE * factors) * dtype.itemsize // 4


def in_words(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """[..., N] float64 as the words of a dtype, which rounds nothing."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype).view(torch.int32).numpy()


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., D] as words [..., D bits / 32], the first code in the lowest bits."""
    each = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, 32 // bits)
    words = (each << (np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits))).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def decoded(tiles: Tensor, width: int, bits: int, dtype: torch.dtype, factors: bool):
    """[B, Hk, 128 N, D] in float64, and the magnitudes of the terms that kernels may add up."""
    words = tiles.view(torch.int32)
    split = words_of_codes(width, bits)
    numbers = exact(words[..., split:].contiguous().view(dtype))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words[..., :split].contiguous().numpy().view(np.uint32)[..., None] >> shifts
    codes = (codes & np.uint32(2**bits - 1)).reshape(*words.shape[:3], TILE, width).astype(np.float64)
    scales, zeros = (numbers[..., None, i * width : (i + 1) * width] for i in range(2))
    value, size = codes * scales + zeros, abs(scales) * 2 ** (bits + 1) + abs(zeros)
    if factors:
        of_tokens = numbers[..., 2 * width :, None]
        value, size = value * of_tokens, size * abs(of_tokens)
    else:
        size = np.broadcast_to(size, value.shape)
    shape = (*words.shape[:2], TILE * words.shape[2], width)
    return tuple(x.reshape(shape) for x in (value, size))


# Quantising tiles


def draw__seal_tiles_(d):
    batch, heads, count = d.one(1, 2, 0), d.one(1, 2), d.one(1, 2, 0)
    width, bits, factors, dtype = d.one(64, 32, 96, 576), d.one(4, 2), d.flag(), d.dtype()
    room = count + d.one(1, 0, 2)
    words = (batch, heads, room, words_of(width, bits, dtype, factors))
    tiles = torch.randint(-(2**31), 2**31, words, generator=d.generator).int()
    return {
        "states": d.values(batch, heads, count * TILE, width, dtype=dtype, scale=d.one(1.0, 1e-3, 30.0)),
        "tiles_": tiles if d.flag() else tiles.view(torch.uint32),
        "start": d.one(*range(room - count + 1)),
        "bits": bits,
        "factors": factors,
    }


def sealed(states: np.ndarray, dtype: torch.dtype, bits: int, factors: bool, off: float) -> list[np.ndarray]:
    """Codes, scales, zero points and factors of [B, Hk, N, 128, D], with an error of float32 in each step."""
    most, numbers = 2**bits - 1, []
    if factors:
        roots = np.sqrt(np.square(states).mean(-1)) * (1 + 16 * off * FLOAT32_EPS)
        of_tokens = round_to(roots, dtype)
        of_tokens[of_tokens == 0] = 1.0
        numbers.append(of_tokens)
        states = states / of_tokens[..., None]
    low, high = states.min(-2), states.max(-2)
    scales = round_to((high - low) / most * (1 + 4 * off * FLOAT32_EPS), dtype)
    zeros = round_to(low * (1 + (4 * off * FLOAT32_EPS if factors else 0)), dtype)
    divisors = np.where(scales > 0, scales, 1.0)[..., None, :]
    codes = np.where(scales[..., None, :] > 0, (states - zeros[..., None, :]) / divisors, 0.0)
    codes = np.clip(np.rint(codes + off * 1e-5 * (1 + abs(codes))), 0, most)
    return [codes, scales, zeros, *numbers]


def expected__seal_tiles_(a):
    words = a.tiles_.view(torch.int32).numpy().copy()
    known = np.ones(words.shape, bool)
    if a.states.numel():
        rows, dtype = slice(a.start, a.start + a.states.shape[2] // TILE), a.states.dtype
        states = exact(a.states).reshape(*a.states.shape[:2], -1, TILE, a.states.shape[3])
        below, above = (sealed(states, dtype, a.bits, a.factors, off) for off in (-1, 1))
        certain = [x == y for x, y in zip(below, above, strict=True)]
        for number in certain[1:3]:
            certain[0] &= number[..., None, :]
            if a.factors:  # another factor of one token may change all numbers of its tile
                number &= certain[3].all(-1, keepdims=True)
                certain[0] &= certain[3].all(-1)[..., None, None]
        leading, parts = states.shape[:3], [packed(below[0], a.bits)]
        parts += [in_words(number, dtype) for number in below[1:]]
        words[:, :, rows] = np.concatenate([part.reshape(*leading, -1) for part in parts], -1)
        each = [c.reshape(*leading, part[0, 0, 0].size, -1) for c, part in zip(certain, parts, strict=True)]
        known[:, :, rows] = np.concatenate([c.all(-1) for c in each], -1)
    return [Expected(words.view(a.tiles_.numpy().dtype), known=known)]


def invalid__seal_tiles_(zeros):
    tiles = zeros(2, 2, 3, 1, dtype=torch.int32)
    return [
        wrong("bits must be 2 or 4, got 3", bits=3),
        wrong("of a number of tokens that is a multiple of 128", states=zeros(2, 2, 100, 32)),
        wrong("of a last dimension that is a multiple of 32", states=zeros(2, 2, 128, 40)),
        wrong("of shape [B, Hk, N, words of a tile] = (2, 2, 3, 576)", tiles_=tiles),
        wrong("between 0 and 1", start=2),
        wrong("between 0 and 1", start=-1),
    ]


# Attention


def draw_tiles(d, shape: tuple[int, ...], dtype: torch.dtype, bits: int, factors: bool) -> Tensor:
    """Random codes; numbers as quantised normal ones have them."""
    *leading, width = shape
    codes = torch.randint(-(2**31), 2**31, (*leading, words_of_codes(width, bits)), generator=d.generator)
    numbers = [
        d.values(*leading, width, dtype=dtype).abs() * 2.0**-bits,
        d.values(*leading, width, dtype=dtype),
    ]
    numbers += [0.5 + d.values(*leading, TILE, dtype=dtype).abs()] * factors
    words = torch.cat((codes.int(), *(each.view(torch.int32) for each in numbers)), -1)
    return words if d.flag() else words.view(torch.uint32)


def draw__tiled_attention(d):
    batch, key_heads, group = d.one(1, 2, 0), d.one(1, 2), d.one(1, 3, 8)
    tokens, position = d.one(1, 2, 5, 0), d.one(300, 0, 126, 127, 128, 129, 255, 256, 389)
    width, value_width = d.one((64, 64), (32, 32), (96, 32), (128, 128), (64, 128))
    dtype, heads, end = d.dtype(), key_heads * group, position + tokens
    k_bits, v_bits, of_keys = d.one(4, 2), d.one(4, 2), value_width <= width and d.flag()
    left_out = d.one(0, max(0, position // TILE * TILE - TILE))
    rows, tiles = end - left_out, max(0, end - 1) // TILE + d.one(0, 2)
    mask, kind = None, d.one("order", "mask")
    if kind == "mask":
        mask = draw_mask(d, batch, key_heads, tokens, end)
    return {
        "q": d.values(batch, heads, tokens, width, dtype=dtype),
        "k_dense": d.values(batch, key_heads, rows, width, dtype=dtype),
        "v_dense": d.values(batch, key_heads, rows, value_width, dtype=dtype),
        "k_tiles": draw_tiles(d, (batch, key_heads, tiles, width), dtype, k_bits, False),
        "v_tiles": None
        if of_keys
        else draw_tiles(d, (batch, key_heads, tiles, value_width), dtype, v_bits, True),
        "k_bits": k_bits,
        "v_bits": k_bits if of_keys else v_bits,
        "position": position,
        "scale": d.one(width**-0.5, 0.25),
        "attn_mask": mask,
        "key_range": None if kind == "mask" else d.maybe(lambda: key_range(d, batch, end)),
        "softcap": d.one(None, 2.0),
        "sinks": d.maybe(lambda: d.values(heads)),
        "gate": d.maybe(lambda: d.values(batch, tokens, heads, d.one(1, value_width), dtype=dtype)),
        "dtype": d.one(None, dtype_name(dtype), "float32"),
    }


def seen_by(a, end: int):
    """Which keys the tokens see, [.., .., T, S], and what is added to their scores."""
    mask = a.attn_mask
    if mask is None:
        return oracles_sequence.causal(a.q.shape[2], end, None, a.key_range)[:, None], np.zeros((1, 1, 1, 1))
    if mask.dtype == torch.bool:
        return mask.numpy(), np.zeros((1, 1, 1, 1))
    if mask.dtype == torch.int32:
        bits = np.unpackbits(mask.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little")
        return bits[..., :end], np.zeros((1, 1, 1, 1))
    seen = (mask > torch.finfo(mask.dtype).min).numpy()
    return seen, np.where(seen, exact(mask), 0.0)


def expected__tiled_attention(a):
    """Token by token of a tile: its keys are dense, quantised and dense."""
    (batch, heads, tokens, _), end = a.q.shape, a.position + a.q.shape[2]
    (width, value_width), dtype = (a.k_dense.shape[3], a.v_dense.shape[3]), a.q.dtype
    keys = decoded(a.k_tiles, width, a.k_bits, dtype, False)
    if a.v_tiles is None:
        values = [x[..., :value_width] for x in keys]
    else:
        values = decoded(a.v_tiles, value_width, a.v_bits, dtype, True)
    seen, added = seen_by(a, end)
    value, error = (
        np.zeros((batch, tokens, heads, value_width)),
        np.zeros((batch, tokens, heads, value_width)),
    )
    left_out = end - a.k_dense.shape[2]
    for own in range(a.position // TILE * TILE, end, TILE):
        first, last = max(own, a.position), min(own + TILE, end)
        of_call = slice(first - a.position, last - a.position)
        parts = []
        for dense, tiles in ((a.k_dense, keys), (a.v_dense, values)):
            start, own_rows = (
                exact(dense[:, :, rows])
                for rows in (slice(min(TILE, own)), slice(own - left_out, last - left_out))
            )
            parts.append(
                [
                    np.concatenate((f(start), tiles[i][:, :, TILE:own], f(own_rows)), 2)
                    for i, f in enumerate((np.copy, abs))
                ]
            )
        (k, k_size), (v, v_size) = parts
        more = added if added.shape[-1] == 1 else added[:, :, of_call, :last]
        value[:, of_call], error[:, of_call] = oracles_sequence.attention(
            a.q[:, :, of_call],
            k,
            v,
            a.sinks,
            a.scale,
            seen[:, :, of_call, :last],
            more,
            a.softcap,
            (k_size, v_size),
        )
    if a.gate is not None:
        x = exact(a.gate)
        factor = np.logaddexp(0.0, x) if a.gate_activation == "softplus" else oracles.sigmoid(x)
        value, error = value * factor, error * factor + abs(value) * 8 * FLOAT32_EPS * factor
    return [Expected(value, error)]


def invalid__tiled_attention(zeros):
    return [
        wrong("2 or 4", k_bits=8),
        wrong("2 or 4", v_bits=3),
        wrong(
            "k_dense must be of a number of heads that divides Hq = 3, got (1, 2, 303, 32)",
            q=zeros(1, 3, T, 32),
        ),
        wrong("between 0 and 2147483644", position=-1),
        wrong(
            "k_dense must be of the first 128 tokens and whole tiles of the last of 304, from the tile of "
            "token 301 on, got (1, 2, 303, 32)",
            position=301,
        ),
        wrong("of shape [B, Hk, N, words of a tile] = (1, 2, 3, 576)", k_tiles=zeros(1, 2, 3, 1).int()),
        wrong(
            "k_tiles must be of at least 2 tiles, got (1, 2, 1, 576)",
            k_tiles=zeros(1, 2, 1, 576).int(),
            v_tiles=zeros(1, 2, 1, 704).int(),
        ),
        wrong("of shape [B, Hk, N, words of a tile] = (1, 2, 3, 704)", v_tiles=zeros(1, 2, 3, 576).int()),
        wrong(
            "v_dense must be of a last dimension up to 32, a multiple of 32, with v_bits = k_bits where "
            "v_tiles is None, got (1, 2, 303, 32)",
            v_tiles=None,
            v_bits=2,
        ),
        wrong("of shape [B, T, Hq, Dv or 1] = (1, 3, 4, 32)", gate=zeros(1, T, 4, 5)),
        wrong("above 0 and finite", softcap=0.0),
        wrong("float32, got bfloat16", dtype="bfloat16"),
    ]
