"""Attention over a KV cache in 4 and 2 bits, and quantising tiles of such a cache.

A tile is 128 tokens of one head. Each of its channels has a scale and a zero point, since the numbers of a
channel differ little over neighbouring tokens. Values also have a factor for each token. A tile lies in one
row of int32: the codes of its tokens, one after another, then the scales, the zero points and the factors,
all in the dtype of the keys.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import NAMED_DTYPES, Check, wide
from .._formats import Format, pack, unpack
from .._registry import operator
from .._sample import Calls, Changes, Sample, whole_groups
from .attention import (
    GATES,
    MAX_HEAD,
    MAX_POSITION,
    MAX_VALUE_HEAD,
    _added,
    _attended,
    _check_mask,
    bits_as_bool,
    seen_in_order,
)

TILE = 128  # tokens
TILE_BITS = (2, 4)
WIDTH = 32  # heads are multiples of so many elements
WORD_BYTES = 4


class TileFormat(NamedTuple):
    """The layout of a tile of one head.

    Attributes:
        width: elements of the head.
        bits: of a code.
        dtype: of the scales, zero points and factors.
        factors: tokens have a factor each.
    """

    width: int
    bits: int
    dtype: torch.dtype
    factors: bool

    @property
    def code_words(self) -> int:
        """Words of the codes of a tile."""
        return TILE * self.width * self.bits // 32

    @property
    def words(self) -> int:
        """Words of a tile."""
        numbers = 2 * self.width + TILE * self.factors
        return self.code_words + numbers * self.dtype.itemsize // WORD_BYTES

    @property
    def is_allowed(self) -> bool:
        return self.width > 0 and self.width % WIDTH == 0


def sealed(states: Tensor, layout: TileFormat) -> Tensor:
    """Tiles [..., N, words] int32 of keys or values [..., 128 N, D]."""
    x = wide(states).unflatten(-2, (-1, TILE))
    numbers = []
    if layout.factors:
        factors = x.square().mean(-1, keepdim=True).sqrt_().to(layout.dtype)
        factors = torch.where(factors == 0, 1.0, factors)
        x = x / wide(factors) + wide(factors) * 0  # NaN where the factor is not finite
        numbers.append(factors.squeeze(-1))
    low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
    not_finite = (x * 0).sum(-2, keepdim=True)  # NaN if any number is, else 0
    most = 2**layout.bits - 1
    scales = ((high - low) / most + not_finite).to(layout.dtype)
    zeros = (low + not_finite).to(layout.dtype)
    codes = ((x - wide(zeros)) / wide(scales)).round_().clamp_(0, most)
    codes = torch.where(wide(scales) > 0, codes, 0.0).to(torch.uint8)
    numbers = [scales.squeeze(-2), zeros.squeeze(-2), *numbers]
    words = [number.contiguous().view(torch.int32) for number in numbers]
    return torch.cat((pack(codes, layout.bits).flatten(-2), *words), -1)


def elements_of_tiles(tiles: Tensor, layout: TileFormat) -> Tensor:
    """Keys or values [..., 128 N, D] of tiles [..., N, words], in float32 or float64."""
    tiles = tiles.view(torch.int32)
    codes, numbers = tiles.split((layout.code_words, layout.words - layout.code_words), -1)
    sizes = (layout.width, layout.width, TILE * layout.factors)
    numbers = numbers.clone(memory_format=torch.contiguous_format).view(layout.dtype)
    scales, zeros, factors = (wide(part) for part in numbers.split(sizes, -1))
    codes = unpack(codes.unflatten(-1, (TILE, -1)), Format(layout.bits, WIDTH))
    x = codes.to(scales.dtype) * scales.unsqueeze(-2) + zeros.unsqueeze(-2)
    return (x * factors.unsqueeze(-1) if layout.factors else x).flatten(-3, -2)


def _check_bits(check: Check, name: str, bits: int) -> None:
    if bits not in TILE_BITS:
        check.fail(name, " or ".join(map(str, TILE_BITS)), bits)


def _check_seal(check, states, tiles_, start, *, bits, factors):
    _check_bits(check, "bits", bits)
    layout = TileFormat(states.shape[3], bits, states.dtype, factors)
    if not layout.is_allowed:
        check.fail("states", f"of a last dimension that is a multiple of {WIDTH}", tuple(states.shape))
    tokens = states.shape[2]
    if tokens % TILE:
        check.fail("states", f"of a number of tokens that is a multiple of {TILE}", tuple(states.shape))
    check.shape("tiles_", tiles_, (*tiles_.shape[:3], layout.words), "[B, Hk, N, words of a tile]")
    check.between("start", start, 0, tiles_.shape[2] - tokens // TILE)


@operator(
    f"states[B, Hk, T, D<={MAX_HEAD}] tiles_[B, Hk, N, _]:packed -> tiles_",
    _check_seal,
)
def _seal_tiles_(states: Tensor, tiles_: Tensor, start: int, *, bits: int, factors: bool = False) -> Tensor:
    """Quantises whole tiles of keys or values, 128 tokens each, into a cache of tiles.

        factor = the root of the mean square of a token, rounded to the dtype; 1 where it is 0
        y = x / factor, or x without factors
        zero = the lowest y of a channel; scale = (the highest - zero) / (2^bits - 1), both rounded
        code = round((y - zero) / scale), between 0 and 2^bits - 1; 0 where scale is 0

    A channel with a number that is not finite has NaN for scale and zero, and codes of 0. With factors, a
    token with such a number makes all channels of its tile NaN.

    Args:
        states: [B, Hk, T, D], float32, float16 or bfloat16, D a multiple of 32 up to 576, T one of 128; any
            strides.
        tiles_: [B, Hk, N, W] int32 or uint32, a tile in each row: 128 D bits / 32 words of codes, the first
            in the lowest bits, then D scales, D zero points and, with factors, 128 factors, all in the dtype
            of `states`; written in place, whatever its strides. It may not overlap itself or `states`.
        start: the tile that the first new one becomes, N - T / 128 at most.
        bits: 2 or 4.
        factors: whether tokens have factors, as values have.

    Returns: `tiles_`. `torch.ops.moe_mps` itself returns nothing.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    In models whose cache holds 4 bits.
    """
    layout = TileFormat(states.shape[3], bits, states.dtype, factors)
    count = states.shape[2] // TILE
    if states.numel():
        tiles_.view(torch.int32)[:, :, start : start + count] = sealed(states, layout)
    return tiles_


def _check_tiles(
    check: Check, name: str, tiles: Tensor, dense: Tensor, bits: int, factors: bool, end: int
) -> None:
    _check_bits(check, f"{name}_bits", bits)
    layout = TileFormat(dense.shape[3], bits, dense.dtype, factors)
    if not layout.is_allowed:
        check.fail(f"{name}_dense", f"of a last dimension that is a multiple of {WIDTH}", tuple(dense.shape))
    check.shape(f"{name}_tiles", tiles, (*tiles.shape[:3], layout.words), "[B, Hk, N, words of a tile]")
    if tiles.shape[2] < (end - 1) // TILE:
        check.fail(f"{name}_tiles", f"of at least {(end - 1) // TILE} tiles", tuple(tiles.shape))


def _check_dense(check: Check, k_dense: Tensor, position: int, tokens: int) -> None:
    rows, end = k_dense.shape[2], position + tokens
    left_out = end - rows
    if left_out < 0 or left_out % TILE or (left_out and position // TILE * TILE < left_out + TILE):
        check.fail(
            "k_dense",
            f"of the first {TILE} tokens and whole tiles of the last of {end}, from the tile of token "
            f"{position} on",
            tuple(k_dense.shape),
        )


def _meta_tiled_attention(check, q, k_dense, v_dense, k_tiles, v_tiles, attn_mask, gate, **given):
    """The checked output [B, T, Hq, Dv] of attention to tiles."""
    heads, tokens = check.dims("Hq T")
    if heads % k_dense.shape[1]:
        check.fail("k_dense", f"of a number of heads that divides Hq = {heads}", tuple(k_dense.shape))
    position, k_bits, v_bits = given["position"], given["k_bits"], given["v_bits"]
    check.between("position", position, 0, MAX_POSITION - tokens)
    _check_dense(check, k_dense, position, tokens)
    end, width = position + tokens, v_dense.shape[3]
    _check_tiles(check, "k", k_tiles, k_dense, k_bits, False, end)
    if v_tiles is not None:
        _check_tiles(check, "v", v_tiles, v_dense, v_bits, True, end)
    elif width > k_dense.shape[3] or width % WIDTH or v_bits != k_bits:
        expected = (
            f"of a last dimension up to {k_dense.shape[3]}, a multiple of {WIDTH}, with v_bits = k_bits"
        )
        check.fail("v_dense", f"{expected} where v_tiles is None", tuple(v_dense.shape))
    if attn_mask is not None:
        _check_mask(check, attn_mask, q, k_dense.new_empty(0).expand(*k_dense.shape[:2], end, 0))
    if given["softcap"] is not None and not 0.0 < given["softcap"] < float("inf"):
        check.fail("softcap", "above 0 and finite", given["softcap"])
    if gate is not None and gate.shape[3] != 1:
        check.shape("gate", gate, (*gate.shape[:3], width), "[B, T, Hq, Dv or 1]")
    wanted = q.dtype if given["dtype"] is None else NAMED_DTYPES[given["dtype"]]
    wider = () if q.dtype == torch.float32 else (torch.float32,)
    check.among_dtypes("dtype", wanted, (q.dtype, *wider))
    return q.new_empty((q.shape[0], tokens, heads, width), dtype=wanted)


@operator(
    f"q[B, Hq, T, D<={MAX_HEAD}] k_dense[B, Hk>=1, R, D]:q v_dense[B, Hk, R, Dv<={MAX_VALUE_HEAD}]:q "
    "k_tiles[B, Hk, N, _]:packed v_tiles[B, Hk, N, _]:packed attn_mask[_, _, T, _]:mask "
    "key_range[B, 2]:int32 sinks[Hq] gate[B, T, Hq, _]:q",
    _meta_tiled_attention,
    allowed={"gate_activation": tuple(GATES)},
    dependences=("key_range not beside attn_mask (beside a mask, which holds it)",),
)
def _tiled_attention(
    q: Tensor,
    k_dense: Tensor,
    v_dense: Tensor,
    k_tiles: Tensor,
    v_tiles: Tensor | None,
    *,
    k_bits: int,
    v_bits: int,
    position: int,
    scale: float,
    attn_mask: Tensor | None = None,
    key_range: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "sigmoid",
    dtype: str | None = None,
) -> Tensor:
    """`_cached_attention` over a KV cache of tiles of 4 or 2 bits. Private: it may change in any release.

    Tile n has the 128 tokens from 128 n on. A token reads tile 0 and its own tile as they are, and all tiles
    between them quantised. So its result does not depend on how many tokens a call has.

    Args:
        q: [B, Hq, T, D], float32, float16 or bfloat16, D a multiple of 32 up to 576.
        k_dense: [B, Hk, R, D] in the dtype of `q`, of S = position + T tokens: all of them, or the first
            128 and the last R - 128, from the beginning of a tile on, at the latest of the first new token's.
        v_dense: [B, Hk, R, Dv] in the dtype of `q`, Dv a multiple of 32 up to 512: the same of the values.
        k_tiles: [B, Hk, N, W] int32 or uint32, as `_seal_tiles_` writes them without factors: all tiles in
            front of the last token's, from that of token 0 on, and any others.
        v_tiles: [B, Hk, N, Wv], with factors; None where the values are the first Dv columns of the keys.
        k_bits, v_bits: 2 or 4.
        position: the number of tokens before the new ones.
        scale, softcap, sinks, gate, gate_activation, dtype: as for `_cached_attention`.
        attn_mask: [B or 1, Hk or 1, T, S] or, of bits, [.., .., T, ceil(S / 32)], as for `cached_attention`.
        key_range: [B, 2] int32, as for `cached_attention`.

    Returns: [B, T, Hq, Dv] in `dtype`. A token that sees no key gets zeros.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    tokens, end, width = q.shape[2], position + q.shape[2], v_dense.shape[3]
    k_layout = TileFormat(k_dense.shape[3], k_bits, k_dense.dtype, False)
    sealed_keys = elements_of_tiles(k_tiles, k_layout)
    if v_tiles is None:
        sealed_values = sealed_keys[..., :width]
    else:
        sealed_values = elements_of_tiles(v_tiles, TileFormat(width, v_bits, v_dense.dtype, True))
    if attn_mask is None:
        attn_mask = seen_in_order(tokens, end, end, None, key_range, q.device)
    elif attn_mask.dtype == torch.int32:
        attn_mask = bits_as_bool(attn_mask, end)
    bias, outs = _added(attn_mask), [q.new_empty((q.shape[0], 0, q.shape[1], width), dtype=torch.float32)]
    left_out = end - k_dense.shape[2]
    for own in range(position // TILE * TILE, end, TILE):
        first, last = max(own, position), min(own + TILE, end)
        rows = slice(first - position, last - position)
        keys, values = (
            torch.cat((wide(dense[:, :, : min(TILE, own)]), tiles[:, :, TILE:own],
                       wide(dense[:, :, own - left_out : last - left_out])), 2)
            for dense, tiles in ((k_dense, sealed_keys), (v_dense, sealed_values))
        )  # fmt: skip
        outs.append(_attended(q[:, :, rows], keys, values, bias[:, :, rows, :last], scale, softcap, sinks))
    out = torch.cat(outs, 1)
    if gate is not None:
        out = out * GATES[gate_activation](wide(gate))
    return out.to(q.dtype if dtype is None else NAMED_DTYPES[dtype])


def judged_tiles(arguments: dict[str, Any], results: list[Tensor]) -> list[Tensor]:
    """Distances of what new tiles decode to from the states, their numbers, and the other tiles.

    Where a number is as far from one code as from the next, either is right.
    """
    tiles, states, start = results[0].view(torch.int32), arguments["states"], arguments["start"]
    layout = TileFormat(states.shape[3], arguments["bits"], states.dtype, arguments["factors"])
    before, new, after = tiles.tensor_split((start, start + states.shape[2] // TILE), 2)
    numbers = new[..., layout.code_words :].contiguous().view(states.dtype)
    apart = (elements_of_tiles(new, layout) - wide(states)).abs()
    return [apart, numbers, torch.cat((before, after), 2)]


def _tiles_of(s: Sample, width: int, count: int, bits: int, factors: bool) -> Tensor:
    layout = TileFormat(whole_groups(width), bits, s.dtype, factors)
    numbers = [s.values(1, 2, count, layout.width) / 2**bits, s.values(1, 2, count, layout.width)]
    if factors:
        numbers.append(s.values(1, 2, count, TILE))
    words = [number.view(torch.int32) for number in numbers]
    return torch.cat((s.codes(1, 2, count, layout.code_words), *words), -1)


def _cache_sample(
    s: Sample, position: int, left_out: int = 0, *, tokens: int | None = None, values: int | None = None
) -> dict[str, Any]:
    """Good arguments of _tiled_attention after so many tokens, in 4 bits. `values`: the width of a head."""
    tokens = tokens or s.T
    end = position + tokens
    arguments: dict[str, Any] = {"k_bits": 4, "v_bits": 4, "position": position, "scale": 0.25}
    arguments["q"] = s.values(1, 4, tokens, whole_groups(s.D))
    for name, width, factors in (("k", s.D, False), ("v", values or s.V, True)):
        arguments[f"{name}_dense"] = s.values(1, 2, end - left_out, whole_groups(width))
        arguments[f"{name}_tiles"] = _tiles_of(s, width, -(-end // TILE), 4, factors)
    return arguments


def _in_bits(s: Sample, k_bits: int, v_bits: int) -> list[dict[str, Any]]:
    """Changes to that of 300 tokens: tiles of other bits, for as many tokens and for more."""
    changes: dict[str, Any] = {"k_bits": k_bits, "v_bits": v_bits}
    for name, width, bits, factors in (("k", s.D, k_bits, False), ("v", s.V, v_bits, True)):
        changes[f"{name}_tiles"] = _tiles_of(s, width, 3, bits, factors)
    more = {"q": s.values(1, 4, 12, whole_groups(s.D)), "position": 300 + s.T - 12}
    return [changes, changes | more]


def _sealed_sample(s: Sample, bits: int, factors: bool) -> dict[str, Any]:
    layout = TileFormat(whole_groups(s.D), bits, s.dtype, factors)
    tiles = torch.zeros(2, 2, 3, layout.words, dtype=torch.int32, device=s.device)
    states = s.values(2, 2, 2 * TILE, layout.width)
    states[0, 0, 3], states[..., 5] = 0.0, 0.0
    return {"states": states, "tiles_": tiles, "start": 1, "bits": bits, "factors": factors}


def _more_attention(s: Sample) -> list[dict[str, Any]]:
    others, keys = s.of("sinks[4] gate[1, T, 4, 1]", softcap=20.0), 300 + s.T
    mask = s.values(1, 1, s.T, keys) > 0.0
    mask[..., TILE : 2 * TILE] = False  # no token sees tile 1
    # Tile 1 is seen in part, and what lies behind it is not.
    key_range = torch.tensor([[140, 200]], dtype=torch.int32, device=s.device)
    latents = {"v_tiles": None, "v_dense": s.values(1, 2, keys, whole_groups(s.V)), "dtype": "float32"}
    return [
        _cache_sample(s, 5),
        _cache_sample(s, 250, tokens=12, values=96),
        _cache_sample(s, 389, left_out=TILE) | others,
        {"attn_mask": mask},
        {"key_range": key_range},
        latents,
        *(change for bits in ((4, 2), (2, 4), (2, 2)) for change in _in_bits(s, *bits)),
    ]


CALLS: Calls = {
    "_seal_tiles_": lambda s: _sealed_sample(s, 4, False),
    "_tiled_attention": lambda s: _cache_sample(s, 300),
}
CHANGES: Changes = {
    "_seal_tiles_": lambda s: [_sealed_sample(s, 2, True), _sealed_sample(s, 4, True)],
    "_tiled_attention": _more_attention,
}
