"""Codes, scales and zeros by importance: the least weighted error that a search finds."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import wide, wide_dtype
from .._encoding import affine_range
from .._formats import FORMATS, Format, decode, dequantize_values, pack
from .._registry import operator
from .._sample import Calls, Changes, Sample

CHUNK = 1 << 18  # weights that the reference takes at a time: what it computes stays in the cache of a core


def _meta_quantize_by_importance(check, weight, format, **_):
    FORMATS[format].check_columns(check, "C, the last dimension of weight,", check.sizes["C"])
    return _empty(weight, FORMATS[format])


def _empty(weight: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rows, columns = weight.shape
    groups = columns // format.group_size
    scales = weight.new_empty(*rows, groups)
    packed = weight.new_empty(*rows, format.packed_columns(columns), dtype=torch.int32)
    sums = weight.new_empty(*rows, groups, 2, dtype=wide_dtype(weight))
    return packed, scales, torch.empty_like(scales), sums


@operator(
    "weight[E, R, C] importance[E, C]:float32",
    _meta_quantize_by_importance,
    allowed={"format": tuple(name for name, to in FORMATS.items() if to.is_affine and to.bits > 1)},
)
def _quantize_by_importance(
    weight: Tensor, importance: Tensor, format: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights quantised to an affine format with an importance matrix, in one dispatch.

    For the weights w of a group, and k the mean squares of their inputs, the minimised error is

        sum k (w - decoded)^2

    the mean square error that it adds to an output, for uncorrelated inputs; k counts as a
    1,000th of the group's mean at least, so that weights that multiply nothing stay near, too: none is
    further off than the largest magnitude of its group. Of several scales and zeros the best are taken;
    codes are chosen again behind the rounding to the stored dtype. MLX's own are among them, so the error is
    never larger than by MLX's rule. Arithmetic is in float32; where
    two scales are equally good but for rounding, devices may choose differently.

    Args:
        weight: [E, R, C], float32, float16 or bfloat16, finite; any strides. C is a multiple of the format's
            group.
        importance: [E, C] float32, finite and not negative; about 1, so that float32 holds the sums.
        format: its name: affine4_64 and so on, of 2 bits and more.

    Returns: packed [E, R, C * bits / 32] int32; scales and zeros [E, R, C / group] in the dtype of `weight`;
        and float32 [E, R, C / group, 2], of each group sum |w - decoded| and sum |w|.

    Raises: ValueError for a dtype, shape, format or device that does not fit.

    In models while they are quantised with an importance matrix.
    """
    stored = FORMATS[format]
    if weight.numel() == 0:
        return _empty(weight, stored)
    importance = counted(importance.unflatten(-1, (1, -1, stored.group_size)))
    outputs, room = _empty(weight, stored), weight.new_empty(0)
    for index in chunks(weight, CHUNK):
        part = weight[index].unflatten(-1, (-1, stored.group_size))
        if room.numel() == 0:  # for all of them: new memory costs as much as the arithmetic
            room = weight.new_empty(5, part.numel(), dtype=wide_dtype(weight))
        groups, *others = [buffer[: part.numel()].view(part.shape) for buffer in room]
        own, dtype = importance[index[0]], weight.dtype
        codes, *line = search(groups.copy_(part), own, dtype, stored.bits, others)
        scales, zeros = (each.to(dtype) for each in line)
        apart = decode(codes, scales, zeros, stored).sub_(groups).abs_().sum(-1)
        sums = torch.stack((apart, groups.abs_().sum(-1)), -1)
        results = pack(codes.flatten(-2), stored.bits), scales, zeros, sums
        for output, result in zip(outputs, results, strict=True):
            output[index] = result
    return outputs


def chunks(weight: Tensor, count: int) -> Iterator[tuple[slice, slice]]:
    """Indices (matrices, rows) of chunks of [E, R, C] of about so many elements; a chunk is a view, whatever
    the strides. None is larger than the first."""
    matrices, rows, columns = weight.shape
    some_rows = max(1, min(rows, count // max(1, columns)))
    some_matrices = max(1, count // max(1, rows * columns))
    for matrix in range(0, matrices, some_matrices):
        for first in range(0, rows, some_rows):
            yield slice(matrix, matrix + some_matrices), slice(first, first + some_rows)


@functools.cache
def constants(name: str) -> tuple[float, ...]:
    """The numbers of a constant of shaders/quantize_moves.h."""
    text = (Path(__file__).parents[2] / "shaders/quantize_moves.h").read_text()
    body = text.partition(f" {name}[")[2].partition(" = ")[2].partition(";")[0]
    return tuple(float(number) for number in re.findall(r"-?[\d.]+", body))


def counted(importance: Tensor) -> Tensor:
    """Importance of groups [..., size] as it counts: a share of its group's mean at least."""
    least = importance.sum(-1, keepdim=True) * (constants("kLeastShare")[0] / importance.shape[-1])
    return torch.maximum(importance, least)


def search(
    groups: Tensor, importance: Tensor, dtype: torch.dtype, bits: int, room: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of `encode`, with errors weighed by importance.

    Args:
        groups: float32 or float64 [M, R, G, group_size].
        importance: float32 [M, 1, G, group_size], not negative.
        dtype: of the scales and zeros.
        room: four tensors like `groups`, to be overwritten.
    """
    low, high, scale, bias, fit = fitted_lines(groups, importance, bits, room)
    scale, half = wide(scale.to(dtype)), 2 ** (bits - 1)
    lines = affine_range(low, high, bits), (scale, bias - half * scale)
    theirs, ours = [(wide(scale.to(dtype)), wide(bias.to(dtype))) for scale, bias in lines]
    error = fit.error_of(fit.apart(groups, *theirs))
    apart = fit.apart(groups, *ours)
    near = apart.amax(-1, keepdim=True) <= torch.maximum(low.abs(), high.abs())
    better = near & (fit.error_of(apart) < error)
    scale, bias = (torch.where(better, our, their) for our, their in zip(ours, theirs, strict=True))
    return fit.codes(groups, scale, bias).to(torch.uint8), scale.squeeze(-1), bias.squeeze(-1)


def fitted_lines(
    groups: Tensor, importance: Tensor, bits: int, room: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, "_Fit"]:
    """Least and largest weight of each group, the scale and bias [..., 1] of least error in float32, and what
    fitted them; codes are from -2^bits / 2 on.

    In steps of the range: t = (w - middle) / step is s * c + m for codes c around zero.
    """
    codes, half = 2**bits, 2 ** (bits - 1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, step = (low + high) / 2, ((high - low) / (codes - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    t = torch.sub(groups, middle, out=room[0]).mul_(1 / step)
    fit = _Fit(t, importance, half, room[1:])
    many, numbers = int(bits > 4), constants("kMove")
    first = torch.full_like(step, 1 - constants("kStart")[many] / codes)
    least, scale, bias = fit.turn(first, first / 2)
    half_of_them = len(numbers) // 2
    moves = numbers[many * half_of_them :][:half_of_them]
    for a, b in zip(moves[::2], moves[1::2], strict=True):
        error, s, m = fit.turn((1 + a / codes) * scale, bias + b * scale)
        better = error < least
        least = torch.where(better, error, least)
        scale, bias = torch.where(better, s, scale), torch.where(better, m, bias)
    return low, high, scale * step, bias * step + middle, fit


class _Fit:
    """Weighted least squares of a scale and a bias for the codes of groups.

    Args:
        t: [M, R, G, group_size].
        k: their weights.
        half: codes are from -half to half - 1.
        room: three tensors like `t`, to be overwritten.
    """

    def __init__(self, t: Tensor, k: Tensor, half: int, room: list[Tensor]):
        self.t, self.k, self.half = t, k, half
        rest, *self.room = room
        self.kt = torch.mul(t, k, out=rest)
        total = k.sum(-1, keepdim=True)
        self.inverse = torch.where(total > 0, 1 / total, 0.0)
        first = self.kt.sum(-1, keepdim=True)
        self.mean = first * self.inverse
        self.variance = torch.mul(self.kt, t, out=self.room[0]).sum(-1, keepdim=True) - first * self.mean

    def turn(self, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Least errors, scales and zeros for the nearest codes; NaN where all codes are equal."""
        inverse = 1 / scale
        c = torch.mul(self.t, inverse, out=self.room[0]).sub_(bias * inverse)
        c.round_().clamp_(-self.half, self.half - 1)
        kc = torch.mul(c, self.k, out=self.room[1])
        first = kc.sum(-1, keepdim=True)
        mean = first * self.inverse
        second = kc.mul_(c).sum(-1, keepdim=True)
        variance = torch.maximum(second - first * mean, constants("kSmallest")[0] * second)
        covariance = c.mul_(self.kt).sum(-1, keepdim=True) - first * self.mean
        fitted = covariance / variance
        return self.variance - fitted * covariance, fitted, self.mean - fitted * mean

    def codes(self, groups: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """The nearest codes of weights, from zero on."""
        # A scale that is zero as it is stored makes codes of zero.
        codes = torch.sub(groups, bias, out=self.room[0]).mul_(torch.where(scale == 0, 0.0, 1 / scale))
        return codes.round_().clamp_(0, 2 * self.half - 1)

    def apart(self, groups: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """Distances of weights from their nearest codes; the next call takes their memory."""
        return self.codes(groups, scale, bias).mul_(scale).add_(bias).sub_(groups).abs_()

    def error_of(self, apart: Tensor) -> Tensor:
        """The weighted error of each group, from distances, which become squares."""
        return apart.square_().mul_(self.k).sum(-1, keepdim=True)


def judged_by_importance(arguments: dict[str, Any], results: list[Tensor]) -> list[Tensor]:
    """Decoded share of a matrix's weights, by importance; the error as stated; and how wrong that is."""
    packed, scales, zeros, sums = results
    weight, importance = wide(arguments["weight"]), arguments["importance"][:, None]
    format = FORMATS[arguments["format"]]
    decoded = dequantize_values(packed, scales, zeros, format)
    products = [(importance * weight * other).sum((1, 2)) for other in (decoded, weight)]
    apart = (decoded - weight).abs().unflatten(-1, (-1, format.group_size)).sum(-1)
    return [products[0] / products[1], sums[..., 1], sums[..., 1] + sums[..., 0] - apart]


def _weights(s: Sample, format: Format = FORMATS["affine4_32"], columns: int = 128) -> dict[str, Any]:
    """Rows to quantise: random, zeros, a constant, numbers near zero, a group that multiplies nothing.

    And a group whose last number is far from the others and counts least.
    """
    weight = s.values(2, 5, columns)
    weight[0, 0], weight[1, 2] = 0.0, 0.5
    weight[0, 1] *= 1e-6
    weight[0, 3], weight[0, 3, -1] = 1 + 0.1 * weight[0, 3], -1.5
    importance = s.values(2, columns, dtype=torch.float32).square()
    importance[1, : format.group_size], importance[0, -1] = 0.0, 0.0
    return {"weight": weight, "importance": importance, "format": format.name}


CALLS: Calls = {"_quantize_by_importance": _weights}
CHANGES: Changes = {
    "_quantize_by_importance": lambda s: [
        _weights(s, FORMATS[to]) for to in ("affine2_128", "affine3_32", "affine5_64", "affine8_32")
    ]
}
