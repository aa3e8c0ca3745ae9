"""ggml's blocks taken apart: the values of the package `gguf`, in as many bytes."""

import importlib.util

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize as values_of
from support.gguf_blocks import HALVES, random_blocks, type_of
from support.processes import REPOSITORY

from torch_moe_mps.ops._formats import Format, dequantize_values
from torch_moe_mps.quantization import gguf, quantize


@pytest.mark.parametrize("name", HALVES)
def test_bit_for_bit_and_byte_for_byte(name, monkeypatch):
    monkeypatch.setattr(gguf, "VALUES_AT_ONCE", 3000)  # in several pieces
    blocks = random_blocks(name, (3, 5, 1024))
    weight = gguf.from_blocks(torch.from_numpy(blocks), gguf.format_of_blocks(name))
    assert weight.format.name == name and weight.packed.shape[:2] == (3, 5)
    values = dequantize_values(weight.packed, weight.scales, weight.biases, weight.format)
    expected = values_of(blocks.reshape(15, -1), type_of(name)).reshape(values.shape)
    assert np.array_equal(values.numpy(), expected) and len(np.unique(expected)) > 30
    assert weight.nbytes == blocks.nbytes


def test_subnormal_and_large_halves_are_exact():
    """Every 13th half, with the largest factors: no product is rounded."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)][::13]
    for name in HALVES:
        for fill in (0, 255):
            blocks = random_blocks(name, (len(halves), GGML_QUANT_SIZES[type_of(name)][0]), seed=fill)
            for first in HALVES[name]:
                blocks[:, first : first + 2] = halves[:, None].view(np.uint8)
            weight = gguf.from_blocks(torch.from_numpy(blocks), gguf.format_of_blocks(name))
            values = dequantize_values(weight.packed, weight.scales, weight.biases, weight.format)
            assert np.array_equal(values.numpy(), values_of(blocks, type_of(name))), name


def test_every_scale_of_nvfp4():
    """Those with a sign, and the largest, which ggml takes for 0."""
    blocks = random_blocks("nvfp4", (64, 64))
    blocks[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    weight = gguf.from_blocks(torch.from_numpy(blocks), gguf.format_of_blocks("NVFP4"))
    values = dequantize_values(weight.packed, weight.scales, weight.biases, weight.format)
    assert np.array_equal(values.numpy(), values_of(blocks, type_of("nvfp4")))


# The mean error for random patterns, at most.
NEAREST = {
    **dict.fromkeys(("iq1_s", "iq3_s", "tq1_0", "tq2_0"), 1e-5),
    **{"iq3_xxs": 0.013, "iq2_xxs": 0.025, "iq2_xs": 0.052, "iq2_s": 0.052, "iq1_m": 0.045},
}


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_format(name, monkeypatch):
    monkeypatch.setattr(gguf, "VALUES_AT_ONCE", 12000)  # in several pieces
    values = torch.from_numpy(values_of(random_blocks(name, (20, 512)), type_of(name)))
    values[3, :32] = 0.25  # equal values
    weight, error = gguf.nearest_of((4, 5, 512), torch.float32, name, values.__getitem__)
    found = dequantize_values(weight.packed, weight.scales, weight.biases, weight.format).view(20, 512)
    assert weight.format == gguf.nearest_format(name) and weight.packed.shape[:2] == (4, 5)
    assert error <= NEAREST[name]
    assert float((found - values).abs().mean() / values.abs().mean()) == pytest.approx(error, abs=1e-6)
    assert (found[3, :32] - 0.25).abs().max() <= 1e-6


def test_the_table_in_the_documentation():
    script = REPOSITORY / "scripts" / "make_gguf_table.py"
    spec = importlib.util.spec_from_file_location("make_gguf_table", script)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.DOCUMENT.read_text().endswith(generator.MARK + generator.table())


def test_errors():
    assert gguf.format_of_blocks("IQ2_XXS") is None and gguf.nearest_format("q4_k") is None
    with pytest.raises(
        ValueError, match=r"from_blocks: blocks must be of rows that are a multiple of 144 bytes"
    ):
        gguf.from_blocks(torch.zeros(2, 143, dtype=torch.uint8), gguf.format_of_blocks("Q4_K"))
    with pytest.raises(ValueError, match="mode must be one of affine, mxfp4, mxfp8, nvfp4, got 'q4_k'"):
        quantize(torch.ones(1, 256), mode="q4_k")
    assert Format.named("q6_k").multiple == 256
