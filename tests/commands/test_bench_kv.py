"""scripts/bench/bench_kv.py, and what it found."""

import json

import bench_kv
import paths
import pytest
import torch

from torch_moe_mps.ops.families.tiles import TileFormat, elements_of_tiles, sealed

PAGE = paths.REPOSITORY / "docs" / "quality_kv.md"


def test_page_is_that_of_what_was_measured():
    kept = json.loads(PAGE.with_suffix(".json").read_text())
    assert all(bench_kv.table(run) in PAGE.read_text() for run in kept["runs"].values())


@pytest.mark.parametrize("name", [name for name in bench_kv.FORMATS if name not in ("float32", "16")])
def test_errors_are_those_of_the_bits(name):
    """Of a tile with a constant channel and a token of zeros."""
    x = torch.randn(2, 1, bench_kv.TILE, 128, generator=torch.Generator().manual_seed(0))
    x[..., 5], x[..., 7, :] = 3.0, 0.0
    format_ = bench_kv.FORMATS[name]
    tile = () if format_.units is None else (x,)
    for function, share in ((format_.keys, format_.bits[0]), (format_.values, format_.bits[1])):
        rounded = function(x, *tile)
        steps = 2 ** int(share) - 1
        assert rounded.shape == x.shape and (rounded - x).square().mean().sqrt() < 8 * x.std() / steps
        assert not torch.equal(rounded, x)


@pytest.mark.parametrize(("name", "bits"), [("tiles 4/4, as built", (4, 4)), ("tiles 4/2, as built", (4, 2))])
def test_format_that_is_built_equals_what_the_operators_write(name, bits):
    x = torch.randn(2, 1, 3 * bench_kv.TILE, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5], x[..., 7, :] = 3.0, 0.0
    x[..., 9] *= 20.0
    format_ = bench_kv.FORMATS[name]
    for function, one, factors in ((format_.keys, bits[0], False), (format_.values, bits[1], True)):
        layout = TileFormat(64, one, torch.float16, factors)
        expected = elements_of_tiles(sealed(x, layout), layout)
        found = function(x.unflatten(2, (-1, bench_kv.TILE))).flatten(2, 3)
        torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)


def test_channels_have_the_units_of_an_earlier_tile():
    """The last token of the third tile, whose codes are those of its channels over their units."""
    names = ["channels of the first tile, 4/4", "channels of the previous tile, 4/4"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(384, 32, generator=generator) * (1 + 9 * torch.rand(32, generator=generator))
    x[128:] *= 3.0
    layer = bench_kv.Layer([bench_kv.FORMATS[name] for name in names], 384)
    for part in x.split((200, 100, 84)):
        layer.update(*2 * [part.expand(2, 1, -1, -1)])
    kept = layer.buffers[0, :, 0]
    assert (kept[:, :128] == x[:128]).all() and not (kept[:, 128:] == x[128:]).all(-1).any()
    first, previous = x[:128], kept[1, 128:256]
    stored = ((torch.zeros(32), first.square().mean(0).sqrt()), (previous.mean(0), previous.std(0, False)))
    for found, numbers in zip(kept[:, -1], stored, strict=True):
        means, units = (each.half().float() for each in numbers)
        y = (x[-1] - means) / units
        low, step = y.min().half().float(), ((y.max() - y.min()) / 15).half().float()
        expected = (((y - low) / step).round() * step + low) * units + means
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_rounds_a_tile_once_it_is_full():
    """8 bits round each token; tiles round the second 128 tokens, and not before the last is there."""
    formats = [bench_kv.FORMATS["8"], bench_kv.FORMATS["tiles 4/4"]]
    layer = bench_kv.Layer(formats, 400)
    states = torch.randn(2, 2, 1, 300, 64, generator=torch.Generator().manual_seed(0))
    for begin, end in ((0, 250), (250, 255), (255, 256), (256, 300)):
        layer.update(states[0, :, :, begin:end], states[1, :, :, begin:end])
        rounded = (layer.buffers[0, :, 0, :end] != states[0, :, 0, :end]).any(-1)
        assert rounded[0].all() and rounded[1].sum() == (128 if end >= 256 else 0)
        assert not rounded[1, :128].any() and not rounded[1, 256:].any()


def test_balanced_rows_and_columns_have_equal_deviations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 64, generator=generator).double()
    x = x * (0.1 + torch.rand(128, 1, generator=generator)) * (0.1 + torch.rand(1, 64, generator=generator))
    rows, columns = bench_kv.balanced(x, 16)
    for dim in (0, 1):
        deviations = (x / rows / columns).std(dim)
        torch.testing.assert_close(deviations, torch.ones_like(deviations), rtol=0.005, atol=0)
