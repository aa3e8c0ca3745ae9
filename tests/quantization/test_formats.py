"""Quantising: bit for bit what MLX writes, and the MXFP4 blocks of checkpoints."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.oracles_experts import dequantise, numbers_of
from support.quantized_layers import ALL_FORMATS, FORMATS, ONE_BIT, bits_of
from support.sweep import covering
from support.values import DTYPES, awkward_weights
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torch_moe_mps.quantization import (
    Format,
    QuantizedWeight,
    dequantize,
    formats,
    quantize,
    repack_mxfp4_blocks,
)


def error_of(stack, format):
    errors = formats.ErrorSums()
    formats.quantize_stack(stack, Format(*numbers_of(format)), errors)
    return errors.relative


def to_mlx(mx, tensor):
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def from_mlx(mx, array):
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    if array.dtype == mx.uint32:
        return torch.from_numpy(np.array(array).view(np.int32)).view(torch.uint32)
    return torch.from_numpy(np.array(array))


@pytest.mark.parametrize(("format", "dtype"), covering((*ALL_FORMATS, *ONE_BIT), DTYPES))
def test_bit_for_bit_as_mlx(format, dtype):
    mx = pytest.importorskip("mlx.core")
    bits, group_size, mode = given = numbers_of(format)
    weight = awkward_weights(dtype)
    if mode == "nvfp4":
        weight[0, 11] = 0  # see test_nvfp4_beyond_the_largest_scale
    ours = quantize(weight, *given)
    with mx.stream(mx.cpu):
        theirs = mx.quantize(to_mlx(mx, weight), group_size=group_size, bits=bits, mode=mode)
        back = mx.dequantize(*theirs, group_size=group_size, bits=bits, mode=mode)
        theirs, back = [from_mlx(mx, array) for array in theirs], from_mlx(mx, back)
    assert ours.packed.dtype == torch.uint32 and (ours.zeros is None) == (mode != "affine")
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        if bits == 1 and mine.is_floating_point():  # MLX takes the sign of the first of several zeros
            mine, other = mine + 0.0, other + 0.0
        assert torch.equal(bits_of(mine), bits_of(other))
    result = dequantize(ours)
    again = dequantize(replace(ours, packed=ours.packed.view(torch.int32)))
    if bits == 1:  # a range over that of float16 has an infinite scale, and zero times that is NaN
        result, back, again = (each.nan_to_num(nan=7.0) + 0.0 for each in (result, back, again))
    assert result.dtype == back.dtype and torch.equal(bits_of(result), bits_of(back))
    assert torch.equal(again, result)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_the_nearest_value_is_chosen(format):
    """No code of the same group is nearer; a dequantised weight is that of the format's definition."""
    bits, _, _ = given = numbers_of(format)
    weight = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(3))
    quantized = quantize(weight, *given)
    values = dequantise(*quantized, format)
    assert np.allclose(dequantize(quantized, torch.float32).numpy(), values, rtol=0, atol=1e-6)
    error = abs(weight.numpy() - values)
    for code in range(2**bits):
        if format == "mxfp8" and code & 0x7F == 0x7F:
            continue  # stands for no number
        digits = np.unpackbits(np.uint8([code]), bitorder="little")[:bits]
        octets = np.packbits(np.tile(digits, 256), bitorder="little")
        filled = torch.from_numpy(octets).expand(2, 5, -1).contiguous().view(torch.int32)
        other = dequantise(filled, quantized.scales, quantized.zeros, format)
        assert (error <= abs(weight.numpy() - other) + 1e-6).all()
    expected = error.mean() / weight.abs().mean().item()
    assert error_of(weight, format) == pytest.approx(expected, rel=1e-4)


def test_views_and_pieces(monkeypatch):
    """Transposed and sliced stacks give what their copies give, however the work is cut."""
    stack = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(4)).mT[:, 1:, :]
    for format in (FORMATS[0], FORMATS[-1]):
        given = numbers_of(format)
        whole = quantize(stack.contiguous(), *given)
        monkeypatch.setattr(formats, "CHUNK", 200)
        for mine, other in zip(quantize(stack, *given), whole, strict=True):
            assert mine is other or torch.equal(bits_of(mine), bits_of(other))
        error = error_of(stack, format)
        monkeypatch.undo()
        assert error == pytest.approx(error_of(stack, format), rel=1e-5)
        single = quantize(stack[1], *given)
        assert torch.equal(bits_of(single.packed), bits_of(whole.packed[1]))
    assert quantize(torch.zeros(2, 0, 32), 4, 32).packed.shape == (2, 0, 4)


def test_the_device_does_not_matter(device):
    weight = torch.randn(2, 64, 5, generator=torch.Generator().manual_seed(7), dtype=torch.bfloat16).mT
    for format in (FORMATS[0], FORMATS[-1]):
        given = numbers_of(format)
        expected, quantized = quantize(weight, *given), quantize(weight.to(device), *given)
        for here, there in zip(expected, quantized, strict=True):
            if here is not None:
                assert there.device.type == device
                assert torch.equal(bits_of(here), bits_of(there).cpu())
        dense = dequantize(quantized)
        assert dense.device.type == device and torch.equal(dense.cpu(), dequantize(expected))
        assert error_of(weight, format) == error_of(weight.to(device), format)


def test_the_default_dtype_does_not_matter():
    weight = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(6))
    x, ids = torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.int32)
    for format in (FORMATS[0], FORMATS[-1]):
        results, given = [], numbers_of(format)
        for dtype in (torch.float32, torch.float16):
            torch.set_default_dtype(dtype)
            try:
                quantized = quantize(weight, *given)
                out = torch.ops.moe_mps.expert_qmm(x, ids, *quantized, format=format)
                results.append([t for t in (*quantized, dequantize(quantized), out) if t is not None])
            finally:
                torch.set_default_dtype(torch.float32)
        for one, other in zip(*results, strict=True):
            assert torch.equal(bits_of(one), bits_of(other))


def test_mxfp4_below_the_smallest_scale():
    """A group under 6 * 2^-127 keeps that scale; it does not wrap around."""
    weight = torch.full((1, 32), 2.0**-128)
    packed, scales, _ = quantize(weight, 4, 32, "mxfp4")
    assert scales.item() == 0
    assert (
        dequantize(QuantizedWeight(packed, scales, None, Format.named("mxfp4")), torch.float32) == 2.0**-128
    ).all()


def test_nvfp4_beyond_the_largest_scale():
    """A group over 6 * 448 takes its largest values; MLX makes zeros of it where dtypes are too coarse."""
    packed, scales, _ = quantize(torch.tensor([1e6, -1e6] * 8)[None], 4, 16, "nvfp4")
    values = dequantize(QuantizedWeight(packed, scales, None, Format.named("nvfp4")))
    assert torch.equal(values, torch.tensor([2688.0, -2688.0] * 8, dtype=torch.bfloat16)[None])


def test_many_small_matrices_are_quantised_together(monkeypatch):
    weight = torch.randn(9, 5, 64, generator=torch.Generator().manual_seed(9))
    calls = []
    encode = formats.encode
    monkeypatch.setattr(formats, "encode", lambda *args: calls.append(args) or encode(*args))
    whole = quantize(weight, 3, 32)
    assert len(calls) == 1
    for i in range(9):
        assert torch.equal(bits_of(quantize(weight[i], 3, 32).packed), bits_of(whole.packed[i]))


def test_mxfp4_blocks_of_gpt_oss():
    """The bytes of a checkpoint, reinterpreted; transformers' own dequantisation says what they mean."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    quantized = repack_mxfp4_blocks(blocks, scales)
    assert quantized.packed.data_ptr() == blocks.data_ptr()
    assert torch.equal(dequantize(quantized), expected)
    turned = blocks.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    for other in (turned, shifted(blocks, 1), shifted(blocks, 2)):
        assert torch.equal(bits_of(repack_mxfp4_blocks(other, scales).packed), bits_of(quantized.packed))


def shifted(tensor, by: int):
    """The same values so many elements behind the beginning of their memory."""
    storage = torch.empty(tensor.numel() + by, dtype=tensor.dtype)[by:].view(tensor.shape)
    return storage.copy_(tensor)


def test_errors():
    ones = torch.ones(2, 64)
    weight = quantize(ones, 4, 32)
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    cases = {
        "quantize: bits must be 1, 2, 3, 4, 5, 6 or 8 for mode affine, got 7": lambda: quantize(ones, 7),
        "quantize: group_size must be 32 for mode mxfp4, got 64": lambda: quantize(ones, 4, 64, "mxfp4"),
        "quantize: bits must be 1, 2, 3, 4, 5, 6 or 8 for mode affine, got '4'": lambda: quantize(ones, "4"),
        "quantize: bits must be 1, 2, 3, 4, 5, 6 or 8 for mode affine, got 4.0": lambda: quantize(ones, 4.0),
        "quantize: group_size must be 32, 64 or 128 for mode affine, got 64.0": lambda: quantize(
            ones, 4, 64.0
        ),
        "quantize: mode must be one of affine, mxfp4, mxfp8, nvfp4, "
        "q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, got 'nf4'": lambda: quantize(ones, 4, 64, "nf4"),
        "quantize: weight must be float32 or float16 or bfloat16, got int32": lambda: quantize(ones.int()),
        "quantize: weight must be 2-D or 3-D, got 1-D of shape (64,)": lambda: quantize(ones[0]),
        "quantize: weight must be of a last dimension that is a multiple of 64, got (2, 33)": lambda: (
            quantize(ones[:, :33])
        ),
        "quantize: weight must be a tensor, got list": lambda: quantize([1.0]),
        "quantize: weight must be a tensor, got None": lambda: quantize(None),
        "quantize: weight must be a tensor with values, got one on meta": lambda: quantize(ones.to("meta")),
        "quantize: importance must be a tensor, got list": lambda: quantize(ones, importance=[1.0] * 64),
        "quantize: format must be a name such as affine4_64 or mxfp4, got [4]": lambda: Format.named([4]),
        "dequantize: dtype must be a dtype of floats, got torch.int32": lambda: dequantize(
            weight, torch.int32
        ),
        "dequantize: dtype must be a dtype of floats, got 'float16'": lambda: dequantize(weight, "float16"),
        "dequantize: format must be a Format, got 'affine4_32'": lambda: dequantize(
            replace(weight, format="affine4_32")
        ),
        "dequantize: scales must be a tensor, got None": lambda: dequantize(replace(weight, scales=None)),
        "repack_mxfp4_blocks: blocks must be a tensor, got None": lambda: repack_mxfp4_blocks(None, None),
        "dequantize: packed must be uint32 or int32, got float32": lambda: dequantize(
            replace(weight, packed=ones)
        ),
        "dequantize: scales must be of shape [..., C / 64] = (2, 1), got (2, 2)": lambda: dequantize(
            replace(weight, format=Format(4, 64))
        ),
        "dequantize: zeros must be a tensor for format affine4_32, got None": lambda: dequantize(
            replace(weight, zeros=None)
        ),
        "dequantize: scales must be uint8, got float32": lambda: dequantize(
            replace(weight, zeros=None, format=Format.named("mxfp4"))
        ),
        "repack_mxfp4_blocks: blocks must be of shape [..., R, C / 32, 16] = (2, 4, 16), got (2, 3, 16)": (
            lambda: repack_mxfp4_blocks(blocks, torch.zeros(2, 4, dtype=torch.uint8))
        ),
        "repack_mxfp4_blocks: blocks must be uint8, got float32": lambda: repack_mxfp4_blocks(
            blocks.float(), torch.zeros(2, 3, dtype=torch.uint8)
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"moe_mps::{message}"
    with pytest.raises(TypeError, match=r"dequantize: weight must be a QuantizedWeight, .* got Tensor$"):
        dequantize(weight.packed)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for format in (FORMATS[0], FORMATS[-1]):
            weight = torch.ones(3, 128)
            weight[1, 77] = bad
            with pytest.raises(ValueError, match="moe_mps::quantize: weight must be finite"):
                quantize(weight, *numbers_of(format))


def test_the_default_group_goes_with_the_mode():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(8))
    assert (Format().group_size, Format(mode="mxfp4").group_size) == (64, 32)
    assert Format(mode="mxfp8") == Format(8, 32, "mxfp8") and Format(mode="nvfp4") == Format(4, 16, "nvfp4")
    assert list(map(str, (Format(6), Format(mode="nvfp4")))) == ["affine6_64", "nvfp4"]
    for given, full in (((8,), (8, 64, "affine")), ((4, None, "mxfp4"), (4, 32, "mxfp4"))):
        quantized = quantize(weight, *given)
        assert quantized.scales.shape == (2, 64 // full[1])
        assert quantized.format == Format(*full)
