"""Groups of float32 values -> codes, scales and zeros, bit for bit as mlx.core.quantize on a CPU."""

import functools

import torch
from torch import Tensor

from ._formats import Format, e4m3, e8m0

# The smallest scale of mlx.core.quantize: a constant group would have a scale of zero.
SMALLEST_SCALE = 1e-7
# Halfway between neighbouring e2m1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the smaller one.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0


def encode(groups: Tensor, dtype: torch.dtype, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """float32 [..., group_size] -> codes uint8 [..., group_size], scales and zeros [...].

    `dtype` is the weight's dtype: it decides how the largest magnitude of a group is rounded.
    """
    if format.has_zeros:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale, bias = affine_range(low, high, format.bits)
        codes = (groups - bias).div_(scale).round_().clamp_(0, 2**format.bits - 1).to(torch.uint8)
        return codes, scale.squeeze(-1), bias.squeeze(-1)
    largest = E2M1_LARGEST if format.bits == 4 else E4M3_LARGEST
    # MLX divides in the dtype of the weight; for a magnitude between two scales, the rounding decides.
    fit = (groups.abs().amax(-1).to(dtype) / largest).float()
    if format.scale_type == "e4m3":
        scales = e4m3_codes(fit)
        # A scale of zero makes codes of zero.
        factors = e4m3(scales).unsqueeze(-1)
        return _e2m1_codes(torch.where(factors == 0, 0.0, groups / factors)), scales, None
    scales = _covering_powers(fit).to(torch.uint8)
    groups = groups * e8m0(254 - scales).unsqueeze(-1)
    return (_e2m1_codes(groups) if format.bits == 4 else e4m3_codes(groups)), scales, None


def affine_range(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros for the ends of ranges, in float32, in the order of operations of MLX.

    The end of the range with the larger magnitude becomes the bias, and the scale is adjusted so that zero is
    hit exactly: weights that are zero stay zero. Codes of 1 bit are the two ends.
    """
    if bits == 1:
        return (high - low).clamp(min=SMALLEST_SCALE), low
    largest = 2**bits - 1
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / largest).clamp(min=SMALLEST_SCALE)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps == 0, scale, edge / steps)
    return scale, torch.where(steps == 0, 0.0, edge)


def _covering_powers(fit: Tensor) -> Tensor:
    """e8m0, as int32, of the smallest power of two that is at least `fit`: so that nothing saturates.

    It stays at 2^-127 below that; mlx.core.quantize wraps around to 2^128 for such groups.
    """
    bits = fit.view(torch.int32)
    field, fraction = bits >> 23, bits & ((1 << 23) - 1)
    scales = torch.where(field == 0, fraction > 1 << 22, field + (fraction > 0))
    return torch.where(bits == 0, 127, scales)


@functools.cache
def _e2m1_table() -> bytearray:
    """The codes for all signs, exponents and 2 bits of mantissa: the midpoints have no more bits."""
    values = (torch.arange(1 << 11, dtype=torch.int32, device="cpu") << 21).view(torch.float32)
    codes = sum((values.abs() > midpoint).to(torch.uint8) for midpoint in E2M1_MIDPOINTS)
    return bytearray((codes + (((values < 0) & (codes > 0)).to(torch.uint8) << 3)).tolist())


def _e2m1_codes(values: Tensor) -> Tensor:
    """Codes by table. The table is indexed by magnitudes rounded up to 2 bits of mantissa, which keeps every
    value on its side of each midpoint."""
    top = (values.view(torch.int32) + ((1 << 21) - 1)) >> 21
    table = torch.frombuffer(_e2m1_table(), dtype=torch.uint8).to(values.device)
    return table.index_select(0, top.bitwise_and_((1 << 11) - 1).flatten()).view(values.shape)


def e4m3_codes(values: Tensor) -> Tensor:
    """Rounded to the nearest, ties to even, and clamped to the largest."""
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
