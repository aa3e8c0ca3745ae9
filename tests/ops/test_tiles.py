"""A KV cache in tiles of 4 and 2 bits: quantising tiles, and attention to them."""

import numpy as np
import pytest
import torch
from support.ops.tiles import TILE, decoded, words_of
from support.oracles import exact, spacing
from support.oracles_operators import checked
from support.sweep import covering
from support.values import DTYPES, EACH_DTYPE, numbers

from torch_moe_mps.ops.families.tiles import _seal_tiles_, _tiled_attention

BITS = [(4, 4), (4, 2), (2, 4), (2, 2)]


def empty_tiles(heads: int, count: int, width: int, bits: int, dtype, factors: bool, batch: int = 1):
    words = words_of(width, bits, dtype, factors)
    return torch.full((batch, heads, count, words), -7, dtype=torch.int32)


def in_tiles(states: torch.Tensor, bits: int, factors: bool) -> torch.Tensor:
    """Whole tiles of [B, Hk, T, D], quantised on the CPU."""
    batch, heads, tokens, width = states.shape
    tiles = empty_tiles(heads, tokens // TILE, width, bits, states.dtype, factors, batch)
    _seal_tiles_(states[:, :, : tokens // TILE * TILE], tiles, 0, bits=bits, factors=factors)
    return tiles


def cache(device, dtype, shape, position, tokens, bits=(4, 4), left_out=0, latent=False):
    """Arguments of a call: shape is [B, Hq, Hk, D, Dv]."""
    batch, heads, key_heads, width, value_width = shape
    end = position + tokens
    arguments = {"q": numbers(batch, heads, tokens, width, dtype=dtype, seed=1), "scale": width**-0.5}
    arguments |= {"k_bits": bits[0], "v_bits": bits[1], "position": position}
    states = numbers(batch, key_heads, end, width, dtype=dtype, seed=2)
    for name, factors in (("k", False), ("v", True)):
        if name == "v" and latent:
            arguments |= {"v_dense": arguments["k_dense"][..., :value_width], "v_tiles": None}
        elif name == "v":
            states = numbers(batch, key_heads, end, value_width, dtype=dtype, seed=3)
        if not (name == "v" and latent):
            dense = torch.cat((states[:, :, :TILE], states[:, :, left_out + TILE :]), 2)
            arguments[f"{name}_dense"] = dense[:, :, : end - left_out]
            arguments[f"{name}_tiles"] = in_tiles(states, bits[name == "v"], factors)
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


# Quantising ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("width", "bits"), [(32, 4), (96, 2), (128, 4), (576, 4)])
def test_numbers_are_off_by_half_a_step(device, dtype, width, bits, factors):
    """The lowest and the highest of a channel are kept; everything else in the cache stays as it is."""
    memory = numbers(2 * 256 * 3 * width + 1, dtype=dtype, scale=4.0).to(device)
    states = memory[1:].view(2, 256, 3, width).transpose(1, 2)  # at an odd element
    tiles = empty_tiles(3, 5, width, bits, dtype, factors, batch=2).to(device)[:, :, 1:]
    checked("_seal_tiles_", states, tiles, 1, bits=bits, factors=factors)
    assert (tiles[:, :, [0, 3]] == -7).all() and (tiles.to("cpu")[:, :, 1:3] != -7).any()
    value, _ = decoded(tiles.cpu()[:, :, 1:3], width, bits, dtype, factors)
    x = exact(states)
    of_tokens = np.sqrt((x**2).mean(-1, keepdims=True)) if factors else np.ones((*x.shape[:3], 1))
    step = (x / of_tokens).reshape(2, 3, 2, TILE, width)
    step = (step.max(-2, keepdims=True) - step.min(-2, keepdims=True)) / (2**bits - 1)
    step = np.broadcast_to(step, (2, 3, 2, TILE, width)).reshape(x.shape) * of_tokens
    # The zero point, the scale times the highest code, and the factor are each rounded.
    rounding = 2 * spacing(abs(x).max(2, keepdims=True) + 2**bits * step, dtype)
    assert (abs(value - x) <= step / 2 + rounding).all()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("factors", [False, True])
def test_degenerate_tiles(device, dtype, factors):
    """Channels of one number, tokens of zeros, numbers that are not finite, and what they leave alone."""
    states = numbers(1, 2, 256, 64, dtype=dtype)
    states[0, 0, :TILE] = 0.0
    states[0, 0, TILE:, 5] = 0.0 if factors else 3.0
    states[0, 1, 200, 7] = torch.inf
    states[0, 1, 100, 9] = torch.nan
    tiles = empty_tiles(2, 2, 64, 4, dtype, factors).to(device)
    _seal_tiles_(states.to(device), tiles, 0, bits=4, factors=factors)
    value, _ = decoded(tiles.cpu(), 64, 4, dtype, factors)
    assert (value[0, 0, :TILE] == 0.0).all()
    assert (value[0, 0, TILE:, 5] == exact(states[0, 0, TILE:, 5])).all()
    wrong = np.zeros((2, 64), bool)
    wrong[0, 9], wrong[1, 7] = True, True
    if factors:
        wrong[:] = True
    assert (np.isnan(value[0, 1]).reshape(2, TILE, 64) == wrong[:, None]).all()
    codes = tiles.cpu()[0, 1, :, : TILE * 8].reshape(2, TILE, 8)
    assert (codes[0, :, 1] & 0xF0 == 0).all() and (codes[1, :, 0] >> 28 == 0).all()


def test_rows_of_words_that_are_not_contiguous(device):
    """They are written, whatever their strides."""
    states = numbers(1, 2, TILE, 32).to(device)
    tiles = empty_tiles(2, 2, 32, 4, torch.float32, True).to(device)
    strided = tiles.repeat(1, 1, 1, 2)[..., ::2]
    for each in (tiles, strided):
        _seal_tiles_(states, each, 1, bits=4, factors=True)
    assert torch.equal(tiles, strided)
    unsigned = empty_tiles(2, 2, 32, 4, torch.float32, True).view(torch.uint32).to(device)
    _seal_tiles_(states, unsigned, 1, bits=4, factors=True)
    assert torch.equal(unsigned.view(torch.int32), tiles)


def test_a_call_is_one_dispatch(simulated):
    """Of any number of tiles; none without tokens."""
    tiles = empty_tiles(2, 4, 32, 4, torch.float32, False).to("mps")
    for tokens, count in ((3 * TILE, 1), (0, 0)):
        states = numbers(1, 2, tokens, 32).to("mps")
        with simulated.trace() as commands:
            _seal_tiles_(states, tiles, 1, bits=4)
        assert len(commands) == count


# Attention ----------------------------------------------------------------------------------------------


SHAPES = [(2, 8, 2, 128, 128), (1, 3, 1, 64, 64), (1, 4, 2, 32, 32), (1, 2, 1, 256, 256), (1, 16, 1, 96, 32)]
EACH_BITS = covering(SHAPES, BITS, DTYPES)


@pytest.mark.on("mps")
@pytest.mark.parametrize(("shape", "bits", "dtype"), EACH_BITS)
def test_a_token_of_each_width(device, shape, bits, dtype):
    """Behind dense tokens, whole tiles of codes and a part of the next; keys that one block takes."""
    for position, left_out in ((300, 0), (515, 256)):
        given = cache(device, dtype, shape, position, 1, bits, left_out)
        out = checked("_tiled_attention", **given, dtype="float32")
        assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_positions_on_every_side_of_tiles(device, dtype):
    for position in (0, 1, 126, 127, 128, 129, 255, 256, 257, 383, 384):
        checked("_tiled_attention", **cache(device, dtype, (1, 2, 1, 32, 32), position, 1))


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("left_out", [0, 128])
def test_a_few_tokens(device, dtype, left_out):
    """Within a tile, over its end, and over the end of the first."""
    for position in (300, 380, 382) if left_out else (125, 253, 300):
        given = cache(device, dtype, (2, 6, 2, 64, 64), position, 5, (4, 2), left_out)
        checked("_tiled_attention", **given, sinks=numbers(6).to(device), softcap=9.0)


@pytest.mark.slow("prompts over several tiles")
@pytest.mark.parametrize("shape", [(1, 4, 2, 64, 64), (1, 2, 1, 128, 128)])
def test_a_prompt(device, shape):
    """Tokens of several tiles, each of which reads the tiles in front of its own in codes."""
    given = cache(device, torch.float16, shape, 250, 200, left_out=0)
    checked("_tiled_attention", **given)


@pytest.mark.parametrize("tokens", [1, 3])
def test_latents(device, tokens):
    """The first columns of the keys' tiles are the values."""
    for heads, left_out in ((20, 256), (3, 0)):
        given = cache(
            device, torch.float32, (1, heads, 1, 576, 512), 500, tokens, left_out=left_out, latent=True
        )
        checked("_tiled_attention", **given)


def test_results_do_not_depend_on_the_tokens_of_a_call(device):
    """By the same bits where the plan is the same: a token reads the same keys in the same form."""
    shape, end = (1, 8, 1, 64, 64), 266
    whole = cache(device, torch.float32, shape, end - 12, 12)
    out = checked("_tiled_attention", **whole)
    for position in (254, 255, 256, 265):
        one = whole | {"q": whole["q"][:, :, position - 254 : position - 253], "position": position}
        one |= {name: whole[name][:, :, : position + 1] for name in ("k_dense", "v_dense")}
        row = checked("_tiled_attention", **one)
        np.testing.assert_allclose(exact(row)[:, 0], exact(out)[:, position - 254], rtol=2e-5, atol=2e-6)


def test_masks_and_ranges(device):
    shape, end = (2, 4, 2, 64, 64), 395
    given = cache(device, torch.float32, shape, end - 3, 3)
    seen = torch.rand(2, 1, 3, end, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[1, :, 1] = False
    added = torch.where(seen, 0.5, -torch.inf)
    bits = np.packbits(seen.numpy(), axis=-1, bitorder="little")
    bits = np.pad(bits, ((0, 0),) * 3 + ((0, -bits.shape[-1] % 4),)).view(np.int32)
    outs = [
        checked("_tiled_attention", **given, attn_mask=mask.to(device))
        for mask in (seen, added, torch.from_numpy(bits))
    ]
    assert torch.equal(outs[0], outs[2]) and (exact(outs[0][1, 1]) == 0.0).all()
    for of in ([[130, 2**31 - 1], [-3, 300]], [[0, 127], [256, 384]], [[393, 394], [50, 20]]):
        key_range = torch.tensor(of, dtype=torch.int32, device=device)
        checked("_tiled_attention", **given, key_range=key_range)


def test_gates(device):
    given = cache(device, torch.bfloat16, (1, 4, 2, 64, 64), 700, 2, left_out=512)
    for width, activation in ((1, "softplus"), (64, "sigmoid")):
        gate = numbers(1, 2, 4, width, dtype=torch.bfloat16).to(device)
        checked("_tiled_attention", **given, gate=gate, gate_activation=activation, dtype="float32")


def test_tiles_that_no_token_sees_are_not_read(simulated):
    """Nor have they an effect; a tile is read whole."""
    given = cache("mps", torch.float32, (1, 2, 1, 32, 32), 600, 1)
    mask = torch.zeros(1, 1, 1, 601, dtype=torch.bool)
    mask[..., [5, 300, 600]] = True
    expected = checked("_tiled_attention", **given, attn_mask=mask.to("mps"))
    for name in ("k", "v"):
        given[f"{name}_tiles"][:, :, [0, 1, 3]] = -1  # all numbers are NaN
        given[f"{name}_dense"][:, :, 128:512] = torch.nan  # tokens that are read in codes
    assert torch.equal(_tiled_attention(**given, attn_mask=mask.to("mps")), expected)
    with simulated.counters() as dispatches:
        _tiled_attention(**given, attn_mask=mask.to("mps"))
    for index, name in ((3, "k_tiles"), (4, "v_tiles")):
        assert dispatches[0].buffers[index].distinct_bytes_read <= given[name][:, :, 2].nbytes


@pytest.mark.parametrize("bits", [(4, 4), (4, 2)])
def test_codes_are_read_once(simulated, bits):
    """By all queries of a key head; of the dense rows, those of the first tile and the last."""
    given = cache("mps", torch.bfloat16, (1, 16, 2, 128, 128), 900, 1, bits, left_out=512)
    with simulated.counters() as dispatches:
        _tiled_attention(**given)
    buffers = dispatches[0].buffers
    for index, name in ((3, "k"), (4, "v")):
        tiles = given[f"{name}_tiles"][:, :, 1:7]
        assert buffers[index].distinct_bytes_read == tiles.nbytes
        dense = given[f"{name}_dense"]
        read = torch.cat((dense[:, :, :128], dense[:, :, 384:]), 2)
        assert buffers[index - 2].bytes_read == read.nbytes


def test_dispatches(simulated):
    """Two where chunks of keys are merged, none without a token."""
    for position, tokens, count in ((200, 1, 1), (900, 1, 2), (900, 0, 0)):
        given = cache("mps", torch.float32, (1, 2, 1, 32, 32), position, tokens)
        with simulated.trace() as commands:
            _tiled_attention(**given)
        assert len(commands) == count


def test_long_calls_are_several_dispatches(simulated):
    """With the same bits."""
    given = cache("mps", torch.float32, (1, 4, 1, 32, 32), 200, 120)
    expected = _tiled_attention(**given)
    torch.ops.moe_mps._limit_dispatches(1e-12)
    try:
        with simulated.trace() as commands:
            found = _tiled_attention(**given)
    finally:
        torch.ops.moe_mps._limit_dispatches(0.15)
    assert torch.equal(found, expected) and len([c for c in commands if "tiles" in str(c)]) > 1


def test_the_same_bits_again(every_order, device):
    given = cache(device, torch.float32, (1, 4, 1, 64, 64), 900, 2, left_out=256)
    results = [_tiled_attention(**given).cpu() for _ in every_order()]
    assert all(torch.equal(result, results[0]) for result in results)


def test_nan_stays_in_its_head(device):
    given = cache(device, torch.float32, (1, 4, 2, 32, 32), 400, 1)
    tiles = given["k_tiles"].view(torch.float32)
    tiles[0, 1, 1, TILE * 4] = torch.nan  # a scale
    out = _tiled_attention(**given)
    assert out[0, 0, 2:].isnan().all() and out[0, 0, :2].isfinite().all()
