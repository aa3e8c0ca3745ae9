"""Codes, scales and biases by importance: the least weighted error that a search finds.

For the weights w of a group, and k the mean squares of what they are multiplied with, the error is

    sum k (w - decoded)^2

which is the mean square of what it adds to an output, of inputs without correlation. Of several scales (and
biases) the best is taken; codes are chosen again behind the rounding to the stored dtype. MLX's own are among
them, so the error is never larger than by MLX's rule.
"""

import torch
from torch import Tensor

from ..ops._formats import Format, e4m3, e8m0
from .encoding import E2M1_LARGEST, E4M3_LARGEST, affine_range, e4m3_codes, encode_with, fitting_scales

# Of affine formats the first scale is 1 - the first number / 2^bits of the range. Each move multiplies the
# best scale so far by 1 + a / 2^bits, and adds b times that scale to the bias; least squares follow. The
# moves were chosen one by one on matrices of SmolLM2. There the error is 1.03 to 1.04 times that of the best
# of 90 starts at 3 to 5 bits, 1.18 and 1.25 times at 6 and 8, where MLX's rule has 2.5 to 4.2 times.
_FEW_BITS = 0.9, (
    (0, 0), (-0.8, 0.25), (0.4, 0), (-0.8, -0.25), (-0.4, 0), (0.8, 0.25), (0, 0), (0.8, -0.5), (0.4, 0),
    (-1.2, -0.5),
)  # fmt: skip
_MANY_BITS = 0.8, (
    (0, 0), (2, -0.5), (0.5, 0), (-0.5, 0), (2, 0), (0, 0), (-1.5, 0.25), (-1, -0.25), (0.5, 0), (-0.5, 0),
)  # fmt: skip
# What is tried of MLX's scale: powers of two for e8m0; for e4m3 also what makes 4 of the largest magnitude.
_STEPS_OF_E8M0 = (-1, 1)
_FACTORS_OF_E4M3 = (1.0, 1.5)
# Of the product of two sums, the least difference that is not rounding.
_SMALLEST = 1e-5


def search(
    groups: Tensor, importance: Tensor, dtype: torch.dtype, format: Format
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `encode` returns, by importance.

    Args:
        groups: float32 [M, R, G, group_size].
        importance: float32 [M, 1, G, group_size], not negative.
        dtype: of the scales and biases of affine formats.
    """
    if format.has_biases:
        return _affine(groups, importance, dtype, format)
    scales = fitting_scales(groups, dtype, format)
    tried = [scales, *(_of_e4m3(groups, importance, scales) if format.mode == "nvfp4" else _of_e8m0(scales))]
    errors = [_error_with(groups, importance, each, format) for each in tried]
    scales = _best(errors, tried)
    return encode_with(groups, scales, format), scales, None


def _sums(values: Tensor, importance: Tensor) -> Tensor:
    """Of each group; the values are overwritten."""
    return values.mul_(importance).sum(-1)


def _best(errors: list[Tensor], tried: list[Tensor]) -> Tensor:
    """Of each group what has the smallest error, the first of equal ones."""
    best, found = errors[0], tried[0]
    for error, each in zip(errors[1:], tried[1:], strict=True):
        better = error < best  # never of NaN
        best, found = torch.where(better, error, best), torch.where(better, each, found)
    return found


# Affine formats


def _affine(
    groups: Tensor, importance: Tensor, dtype: torch.dtype, format: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """In steps of the range: t = (w - middle) / step is s * c + m for codes c around zero."""
    codes, half = 2**format.bits, 2 ** (format.bits - 1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, step = (low + high) / 2, ((high - low) / (codes - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    fit = _Fit((groups - middle).mul_(1 / step), importance, half)
    start, moves = _FEW_BITS if format.bits <= 4 else _MANY_BITS
    first = torch.full_like(step, 1 - start / codes)
    least, scale, bias = fit.turn(first, first / 2)
    for a, b in moves:
        error, s, m = fit.turn((1 + a / codes) * scale, bias + b * scale)
        better = error < least
        least = torch.where(better, error, least)
        scale, bias = torch.where(better, s, scale), torch.where(better, m, bias)
    scale, bias = (scale * step).to(dtype).float(), bias * step + middle
    own, mlx = (scale, bias - half * scale), affine_range(low, high, format.bits)
    tried = [
        _encoded(groups, importance, s.to(dtype).float(), b.to(dtype).float(), codes - 1)
        for s, b in (mlx, own)
    ]
    (error, *theirs), (least, *ours) = tried
    better = (least < error).unsqueeze(-1)
    chosen, scale, bias = (torch.where(better, our, their) for our, their in zip(ours, theirs, strict=True))
    return chosen.to(torch.uint8), scale.squeeze(-1), bias.squeeze(-1)


class _Fit:
    """Weighted least squares of a scale and a bias for the codes of groups.

    Args:
        t: [M, R, G, group_size].
        k: their weights.
        half: codes are from -half to half - 1.
    """

    def __init__(self, t: Tensor, k: Tensor, half: int):
        self.t, self.k, self.half = t, k, half
        self.kt = t * k
        total = k.sum(-1, keepdim=True)
        self.inverse = torch.where(total > 0, 1 / total, 0.0)
        first = self.kt.sum(-1, keepdim=True)
        self.mean = first * self.inverse
        self.variance = (self.kt * t).sum(-1, keepdim=True) - first * self.mean

    def turn(self, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For the nearest codes the least error, and its scale and bias; NaN for codes that are all alike."""
        inverse = 1 / scale
        c = (self.t * inverse).sub_(bias * inverse).round_().clamp_(-self.half, self.half - 1)
        kc = c * self.k
        first = kc.sum(-1, keepdim=True)
        mean = first * self.inverse
        second = kc.mul_(c).sum(-1, keepdim=True)
        variance = torch.maximum(second - first * mean, _SMALLEST * second)
        covariance = c.mul_(self.kt).sum(-1, keepdim=True) - first * self.mean
        fitted = covariance / variance
        return self.variance - fitted * covariance, fitted, self.mean - fitted * mean


def _encoded(
    groups: Tensor, importance: Tensor, scale: Tensor, bias: Tensor, largest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The error of the nearest codes, these as float32, the scale and the bias."""
    # A scale that is zero as it is stored makes codes of zero.
    codes = (groups - bias).mul_(torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(0, largest)
    values = (codes * scale).add_(bias)
    return _sums(values.sub_(groups).square_(), importance), codes, scale, bias


# Formats without biases


def _error_with(groups: Tensor, importance: Tensor, scales: Tensor, format: Format) -> Tensor:
    factors = (e4m3 if format.mode == "nvfp4" else e8m0)(scales).unsqueeze(-1)
    numbers = _rounded(groups * torch.where(factors == 0, 0.0, 1 / factors), format.bits)
    return _sums(numbers.mul_(factors).sub_(groups).square_(), importance)


def _rounded(values: Tensor, bits: int) -> Tensor:
    """The nearest numbers of e2m1, or of e4m3."""
    smallest, mantissa, largest = (1.0, 1, E2M1_LARGEST) if bits == 4 else (2.0**-6, 3, E4M3_LARGEST)
    powers = values.abs().clamp_(min=smallest).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    steps = powers.mul_(0.5**mantissa)
    return (values / steps).round_().mul_(steps).clamp_(-largest, largest)


def _of_e8m0(scales: Tensor) -> list[Tensor]:
    return [(scales.int() + step).clamp(0, 254).to(torch.uint8) for step in _STEPS_OF_E8M0]


def _of_e4m3(groups: Tensor, importance: Tensor, scales: Tensor) -> list[Tensor]:
    """Other scales, and for the numbers that are nearest with each the least squares."""
    found = []
    for factor in _FACTORS_OF_E4M3:
        factors = e4m3(e4m3_codes(e4m3(scales) * factor)).unsqueeze(-1)
        numbers = _rounded(groups * torch.where(factors == 0, 0.0, 1 / factors), 4)
        kn = numbers * importance
        fitted = _sums(numbers.square(), importance)
        fitted = (kn.mul_(groups)).sum(-1) / fitted
        found.append(e4m3_codes(torch.where(fitted > 0, fitted, factors.squeeze(-1))))
    return found
