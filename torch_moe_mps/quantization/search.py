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

# Of affine formats the first scale, as a share of the range, and then moves from the best found so far:
# factors of its scale, and steps added to its bias. Each is followed by least squares. On matrices of SmolLM2
# the error is then 1.05 times that of 1,500 starts, at 4 and at 3 bits; with four shares of the range and two
# turns of least squares, which cost the same, it is 1.11 and 1.08 times that.
FIRST = 0.95
MOVES = ((0.9, 0.0), (1.0, 0.4), (1.0, -0.4), (0.95, 0.0), (1.05, 0.0))
# From so many bits on, one move is made: there is little left to find.
MANY_BITS = 6
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
    t = (groups - middle).mul_(1 / step)
    fit = _Fit(t, importance, half)
    first = torch.full_like(step, FIRST)
    least, scale, bias = fit.turn(first, first / 2)
    for factor, shift in MOVES if format.bits < MANY_BITS else MOVES[:1]:
        error, s, m = fit.turn(factor * scale, bias + shift * scale)
        better = error < least
        least = torch.where(better, error, least)
        scale, bias = torch.where(better, s, scale), torch.where(better, m, bias)
    scale, bias = (scale * step).to(dtype).float(), bias * step + middle
    bias = bias - half * scale
    own, mlx = (scale, bias), affine_range(groups, format.bits)
    pairs = [(s.to(dtype).float(), b.to(dtype).float()) for s, b in (mlx, own)]
    errors = [_error_of(groups, importance, *pair, codes - 1) for pair in pairs]
    better = (errors[1] < errors[0]).unsqueeze(-1)
    scale, bias = (torch.where(better, ours, theirs) for theirs, ours in zip(*pairs, strict=True))
    chosen = _nearest(groups, scale, bias, codes - 1).to(torch.uint8)
    return chosen, scale.squeeze(-1), bias.squeeze(-1)


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


def _nearest(groups: Tensor, scale: Tensor, bias: Tensor, largest: int) -> Tensor:
    # A scale that is zero as it is stored makes codes of zero.
    return (groups - bias).mul_(torch.where(scale == 0, 0.0, 1 / scale)).round_().clamp_(0, largest)


def _error_of(groups: Tensor, importance: Tensor, scale: Tensor, bias: Tensor, largest: int) -> Tensor:
    values = _nearest(groups, scale, bias, largest).mul_(scale).add_(bias)
    return _sums(values.sub_(groups).square_(), importance)


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
