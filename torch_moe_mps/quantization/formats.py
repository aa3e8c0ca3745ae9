"""Quantised weights: the formats of `torch.ops.moe_mps.expert_qmm`, written and read.

    format                      value                      bits per weight   mean error, normal weights
    affine, 8 bits, group 64    q * scale + bias           8.5                0.7 %
    affine, 4 bits, group 32    q * scale + bias           5                  8.5 %
    affine, 4 bits, group 64    q * scale + bias           4.5                9.7 %
    affine, 4 bits, group 128   q * scale + bias           4.25              10.7 %
    mxfp4                       e2m1(q) * 2^(scale - 127)  4.25              11.3 %

(q is unsigned; scales and biases in 16 bit; rounding to bfloat16 alone is 0.14 %.)
Both are written bit for bit as mlx.core.quantize writes them on a CPU: groups of consecutive values along the
last dimension, 32 / bits values per uint32, the first value in the lowest bits.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._checks import ACTIVATION_DTYPES, Check
from ..ops.quantized import check_format, dequantize_values, e8m0, unpack

# Values quantised at a time: enough to amortise the calls, with float32 temporaries of about 100 MiB.
CHUNK = 1 << 22
# mlx.core.quantize keeps scales of (nearly) constant groups away from zero with this.
SMALLEST_SCALE = 1e-7
# Halfway between neighbouring e2m1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the smaller one.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_LARGEST = 6.0


@dataclass(frozen=True)
class QuantizationFormat:
    """How weights are quantised: 4 or 8 bits, groups of 32, 64 or 128, mode "affine"; or 4, 32, "mxfp4".

    A group_size of None becomes 64 in mode "affine" and 32 in "mxfp4".
    """

    bits: int = 4
    group_size: int | None = None
    mode: str = "affine"

    def __post_init__(self):
        if self.group_size is None:
            object.__setattr__(self, "group_size", 32 if self.mode == "mxfp4" else 64)
        check_format(Check("quantize"), self.bits, self.group_size, self.mode)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "mxfp4" if self.mode == "mxfp4" else f"int{self.bits} group {self.group_size}"


def requested_format(bits: int | None, group_size: int | None, mode: str | None) -> QuantizationFormat | None:
    """The format that optional arguments ask for; None for none. Only mode "mxfp4" knows its bits.

    Raises: ValueError for a format that does not exist, and for a group_size or a mode without bits.
    """
    if bits is None and mode == "mxfp4":
        bits = 4
    if bits is not None:
        return QuantizationFormat(bits, group_size, "affine" if mode is None else mode)
    for argument, value in (("group_size", group_size), ("mode", mode)):
        if value is not None:
            raise ValueError(f"moe_mps::quantize: {argument}={value!r} needs bits, 4 or 8, got None")
    return None


class QuantizedWeight(NamedTuple):
    """packed [..., R, C * bits / 32] uint32; scales, biases [..., R, C / group_size]; no biases in mxfp4."""

    packed: Tensor
    scales: Tensor
    biases: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def _check_weight(weight: Tensor, format: QuantizationFormat) -> None:
    check = Check("quantize")
    check.dtype("weight", weight, ACTIVATION_DTYPES)
    check.rank("weight", weight, (2, 3))
    if weight.shape[-1] % format.group_size != 0:
        expected = f"of a last dimension that is a multiple of {format.group_size}"
        check.fail("weight", expected, tuple(weight.shape))


def check_finite(check: Check, argument: str, stack: Tensor) -> None:
    """By the sum of magnitudes: no range in it is larger, and it takes 6 % of the time of quantising."""
    for index in _chunks(stack):
        if not torch.isfinite(stack[index].abs().sum(dtype=torch.float32)):
            check.fail(argument, "finite", "NaN, inf or a range over that of float32")


def empty_weight(
    shape: tuple[int, ...], dtype: torch.dtype, device, format: QuantizationFormat
) -> QuantizedWeight:
    *rows, columns = shape
    packed = torch.empty(*rows, columns * format.bits // 32, dtype=torch.uint32, device=device)
    groups = (*rows, columns // format.group_size)
    if format.mode == "mxfp4":
        return QuantizedWeight(packed, torch.empty(groups, dtype=torch.uint8, device=device), None)
    return QuantizedWeight(packed, *(torch.empty(groups, dtype=dtype, device=device) for _ in range(2)))


def _chunks(weight: Tensor) -> Iterator[tuple[int, slice]]:
    """Indices (matrix, rows) of pieces of about CHUNK values; a piece is a view, whatever the strides."""
    matrices, rows, columns = weight.shape
    step = max(1, CHUNK // max(1, columns))
    for matrix in range(matrices):
        for first in range(0, rows, step):
            yield matrix, slice(first, min(first + step, rows))


def _at_hand(piece: Tensor) -> Tensor:
    """On the CPU if it is on MPS: the bits must not depend on how a GPU divides."""
    return piece.cpu() if piece.device.type == "mps" else piece


def _quantize_affine(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [..., group_size] -> q uint8, scale, bias; in float32, in the order of operations of MLX.

    The end of the range with the larger magnitude becomes the bias, and the scale is adjusted so that zero is
    hit exactly: weights that are zero stay zero.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = 2**bits - 1
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / largest).clamp(min=SMALLEST_SCALE)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps == 0, scale, edge / steps)
    bias = torch.where(steps == 0, 0.0, edge)
    q = (groups - bias).div_(scale).round_().clamp_(0, largest).to(torch.uint8)
    return q, scale.squeeze(-1), bias.squeeze(-1)


def _quantize_mxfp4(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 [..., 32] -> e2m1 codes uint8, e8m0 scales uint8.

    The scale is the smallest power of two at which the largest magnitude fits, so that nothing saturates. It
    stays at 2^-127 below that; mlx.core.quantize wraps around to 2^128 for such groups.
    """
    # MLX divides in the dtype of the weight, which decides when the magnitude is between two powers.
    fit = (groups.abs().amax(-1).to(dtype) / E2M1_LARGEST).float().view(torch.int32)
    field, fraction = fit >> 23, fit & ((1 << 23) - 1)
    scales = torch.where(field == 0, fraction > 1 << 22, field + (fraction > 0))
    scales = torch.where(fit == 0, 127, scales)
    scaled = groups * e8m0(254 - scales).unsqueeze(-1)
    magnitudes, code = scaled.abs(), torch.zeros_like(groups, dtype=torch.uint8)
    for midpoint in E2M1_MIDPOINTS:  # 4 times faster than torch.bucketize
        code += magnitudes > midpoint
    code += ((scaled < 0) & (code > 0)).to(torch.uint8) << 3
    return code, scales.to(torch.uint8)


def _pack(q: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> int32 [..., C * bits / 32], the first value in the lowest bits."""
    if bits == 4:
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    return q.contiguous().view(torch.int32)


@torch.no_grad()
def quantize(
    weight: Tensor, bits: int = 4, group_size: int | None = None, mode: str = "affine"
) -> QuantizedWeight:
    """Quantise a matrix, or a stack of matrices one after the other, along the last dimension.

    Args:
        weight: [R, C] or [E, R, C], float32, float16 or bfloat16, any strides; C a multiple of group_size.
        bits, group_size, mode: see QuantizationFormat.

    Returns: QuantizedWeight(packed, scales, biases). In mode affine, scales and biases have the dtype of
        `weight`. The memory beside the result stays under about 100 MiB.

    Raises: ValueError for a shape, dtype or format that does not fit, and for weights that are not finite.
    """
    format = QuantizationFormat(bits, group_size, mode)
    _check_weight(weight, format)
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    check_finite(Check("quantize"), "weight", stack)
    out = quantize_stack(stack, format)
    if weight.dim() == 2:
        return QuantizedWeight(*(None if tensor is None else tensor.squeeze(0) for tensor in out))
    return out


@torch.no_grad()
def quantize_stack(stack: Tensor, format: QuantizationFormat) -> QuantizedWeight:
    """quantize for [E, R, C] that was checked."""
    out = empty_weight(stack.shape, stack.dtype, stack.device, format)
    words = out.packed.view(torch.int32)
    for index in _chunks(stack):
        groups = _at_hand(stack[index]).float().unflatten(-1, (-1, format.group_size))
        if format.mode == "mxfp4":
            q, scales = _quantize_mxfp4(groups, stack.dtype)
        else:
            q, scales, biases = _quantize_affine(groups, format.bits)
            out.biases[index] = biases.to(stack.dtype)
        out.scales[index] = scales.to(out.scales.dtype)
        words[index] = _pack(q.flatten(-2), format.bits)
    return out


@torch.no_grad()
def dequantize(
    packed: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    bits: int = 4,
    group_size: int | None = None,
    mode: str = "affine",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The dense weights [..., R, C], rounded as mlx.core.dequantize rounds them.

    Args:
        packed, scales, biases: as quantize returns them; int32 is accepted for uint32.
        bits, group_size, mode: see QuantizationFormat.
        dtype: of the result; None means that of `scales`, and bfloat16 in mode mxfp4.

    Raises: ValueError for a shape, dtype or format that does not fit.
    """
    format = QuantizationFormat(bits, group_size, mode)
    check = Check("dequantize")
    check.dtype("packed", packed, (torch.uint32, torch.int32))
    group_size, columns = format.group_size, packed.shape[-1] * 32 // bits
    check.shape("scales", scales, (*packed.shape[:-1], columns // group_size), "[..., C / group_size]")
    if format.mode == "mxfp4":
        check.dtype("scales", scales, (torch.uint8,))
        if biases is not None:
            check.fail("biases", "None for mode mxfp4", f"a tensor of shape {tuple(biases.shape)}")
        values = dequantize_values(packed, scales, None, bits, group_size, mode)
        return values.to(dtype or torch.bfloat16)
    check.dtype("scales", scales, ACTIVATION_DTYPES)
    if biases is None:
        check.fail("biases", "a tensor for mode affine", None)
    check.dtype("biases", biases, (scales.dtype,))
    check.shape("biases", biases, scales.shape, "[..., C / group_size]")
    # In the dtype of the scales, rounded after the product and after the sum.
    q = unpack(packed, bits, mode).to(scales.dtype).unflatten(-1, (-1, group_size))
    values = (q * scales.unsqueeze(-1)).add_(biases.unsqueeze(-1)).flatten(-2)
    return values.to(dtype or scales.dtype)


def repack_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """MXFP4 as gpt-oss checkpoints store it -> mode mxfp4, by reinterpreting the bytes.

    Args:
        blocks: uint8 [..., R, C / 32, 16], two values per byte, the first in the lower half.
        scales: uint8 [..., R, C / 32].

    Returns: QuantizedWeight(packed [..., R, C / 8] uint32, scales, None), on the memory of `blocks` if that
        is contiguous.

    Raises: ValueError for a shape or dtype that does not fit.
    """
    check = Check("repack_mxfp4_blocks")
    check.dtype("blocks", blocks, (torch.uint8,))
    check.dtype("scales", scales, (torch.uint8,))
    check.shape("blocks", blocks, (*scales.shape, 16), "[..., R, C / 32, 16]")
    packed = blocks.contiguous().flatten(-2)
    if packed.storage_offset() % 4 != 0:
        packed = packed.clone()
    return QuantizedWeight(packed.view(torch.int32).view(torch.uint32), scales, None)


@torch.no_grad()
def relative_error(weight: Tensor, quantized: QuantizedWeight, format: QuantizationFormat) -> float:
    """mean |weight - dequantised| / mean |weight| of a stack [E, R, C]; 0 for weights that are all zero."""
    difference = magnitude = 0.0
    for index in _chunks(weight):
        parts = [None if tensor is None else _at_hand(tensor[index]) for tensor in quantized]
        dense = _at_hand(weight[index]).float()
        difference += float((dense - dequantize_values(*parts, **format.to_dict())).abs().sum())
        magnitude += float(dense.abs().sum())
    return difference / magnitude if magnitude > 0 else 0.0
