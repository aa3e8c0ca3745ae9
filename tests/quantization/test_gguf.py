"""ggml's blocks taken apart: the values of the package `gguf`, in as many bytes."""

import importlib.util

import numpy as np
import pytest
import torch
from support.gguf_blocks import HALVES, SIZES, random_blocks, set_half, values_of
from support.processes import REPOSITORY

from torch_moe_mps.ops._formats import Format, dequantize_values
from torch_moe_mps.quantization import gguf, quantize


@pytest.mark.parametrize("name", HALVES)
def test_bit_for_bit_and_byte_for_byte(name, monkeypatch):
    monkeypatch.setattr(gguf, "VALUES_AT_ONCE", 3000)  # in several pieces
    blocks = random_blocks(name, (3, 5, 1024))
    weight = gguf.from_blocks(torch.from_numpy(blocks), name)
    assert weight.format == gguf.format_of_blocks(name) and weight.packed.shape[:2] == (3, 5)
    values = dequantize_values(weight.packed, weight.scales, weight.zeros, weight.format)
    expected = values_of(blocks.reshape(15, -1), name).reshape(values.shape)
    assert np.array_equal(values.numpy(), expected) and len(np.unique(expected)) > 30
    larger = 66 / 54 if name == "tq1_0" else 1  # five values of three levels in a byte are eight bits
    assert weight.nbytes == round(blocks.nbytes * larger)


def test_subnormal_and_large_halves_are_exact():
    """Every 257th half, with the largest factors: no product is rounded."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)][::257]
    for name in HALVES:
        for fill in (0, 255):
            blocks = random_blocks(name, (len(halves), SIZES[name][0]), seed=fill)
            for number in range(2):
                set_half(blocks, name, number, halves)
            weight = gguf.from_blocks(torch.from_numpy(blocks), name)
            values = dequantize_values(weight.packed, weight.scales, weight.zeros, weight.format)
            assert np.array_equal(values.numpy(), values_of(blocks, name)), name


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")  # of ggml's own NaN
def test_one_block_at_an_odd_address(name):
    """With an infinite half: the values are ggml's."""
    for number in range(max(1, len(HALVES[name]))):
        block = random_blocks(name, (1, SIZES[name][0]), seed=number)
        set_half(block, name, number, np.array([np.inf], np.float16))
        odd = torch.from_numpy(np.pad(block[0], (1, 0)))[1:]
        weight = gguf.from_blocks(odd, name)
        values = dequantize_values(weight.packed, weight.scales, weight.zeros, weight.format)
        expected = values_of(block, name)[0]
        assert np.array_equal(values.numpy(), expected, equal_nan=True)
        assert not HALVES[name] or np.isinf(expected).any()


def test_every_scale_of_nvfp4():
    """Those with a sign, and the largest, which ggml takes for 0."""
    blocks = random_blocks("nvfp4", (64, 64))
    blocks[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    weight = gguf.from_blocks(torch.from_numpy(blocks), "NVFP4")
    values = dequantize_values(weight.packed, weight.scales, weight.zeros, weight.format)
    assert np.array_equal(values.numpy(), values_of(blocks, "nvfp4"))


def test_the_tables_in_the_documentation():
    script = REPOSITORY / "scripts" / "make" / "make_gguf_table.py"
    spec = importlib.util.spec_from_file_location("make_gguf_table", script)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    text, rows = generator.DOCUMENT.read_text(), generator.architectures()
    assert text.endswith(generator.MARK + generator.table())
    assert f"{generator.ARCHITECTURES_MARK}{rows}{generator.END_MARK}" in text
    assert all(f"| {name} |  | {why} |" in rows for name, why in generator.LEFT_OUT.items())


def test_errors():
    assert gguf.format_of_blocks("Q8_K") is None
    with pytest.raises(
        ValueError, match=r"from_blocks: blocks must be of rows that are a multiple of 144 bytes"
    ):
        gguf.from_blocks(torch.zeros(2, 143, dtype=torch.uint8), "Q4_K")
    for name in ("q8_k", "q9_0", None):
        with pytest.raises(ValueError, match=rf"from_blocks: name must be one of q4_0, .*, got {name!r}$"):
            gguf.from_blocks(torch.zeros(2, 144, dtype=torch.uint8), name)
    with pytest.raises(ValueError, match=r"from_blocks: blocks must be of one dimension or more, got \(\)"):
        gguf.from_blocks(torch.zeros((), dtype=torch.uint8), "q4_k")
    with pytest.raises(ValueError, match=r"mode must be one of affine, .*, iq4_xs, got 'q4_0'"):
        quantize(torch.ones(1, 256), mode="q4_0")
    assert Format.named("q6_k").multiple == 256
