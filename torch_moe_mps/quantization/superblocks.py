"""Superblocks of 256 weights, chosen by importance: the least weighted error that a search finds.

The types are those whose groups have integers as scales (_weight_formats.py): a weight is

    number(code) * (d * s) - m * n

with s and n of its group, and d and m, float16, of the superblock; types without minima have no m and n. The
error of a superblock is sum k (w - decoded)^2 for the importance k. The search has three steps:

1. In float32, the best scale and minimum of every group by itself: several starts, and least squares for the
   nearest codes of each.
2. d and m that make the largest of them the largest integers, and the nearest integers for the others.
3. Twice: for every group the best of the integers next to its own; then d and m by least squares for all
   codes of the superblock.

A group with a weight whose error exceeds its largest magnitude is searched again with equal weights.
Stored numbers are compared, with the nearest codes. Where d would be below the least
float16, 6e-8, weights become zero.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .._weight_formats import LARGE_BLOCK, Integers
from ..ops._formats import LEVELS, Format, pack, pack_bytes
from ..ops.families.quantize import counted, fitted_lines

# Starts of a scale without a minimum: the weight of largest magnitude becomes one of the ends of the numbers,
# or lies so many of their last steps outside of it.
STARTS = (0, 1, -1)
ROUNDS = 2
LARGEST_HALF = 65504.0  # d and m are not larger
SMALLEST = 1e-30  # scales below count as 0


class Superblocks(NamedTuple):
    """Superblocks of N weights.

    Attributes:
        d, m: [N, 1, 1], of float16's numbers in float32; m is 0 in types without minima.
        s, n: [N, groups, 1], integers in float32, less their centre.
    """

    d: Tensor
    m: Tensor
    s: Tensor
    n: Tensor


def quantize_superblocks(
    weight: Tensor, importance: Tensor | None, format: Format, integers: Integers
) -> tuple[Tensor, ...]:
    """Quantise to a format whose scales are integers.

    Args:
        weight: float32 [..., C], finite; C a multiple of 256.
        importance: float32 that expands to `weight`, not negative; None is the same for all.
        format, integers: format, and its scales.

    Returns: packed, scales and zeros as _weight_formats.py lays them out, and of the rows sum |w - decoded|
        and sum |w|, float32 [..., 2].
    """
    size = format.group_size
    groups = weight.reshape(-1, LARGE_BLOCK // size, size)
    importance = _weighed(groups.view(-1, LARGE_BLOCK), importance, weight.shape).view(groups.shape)
    search = _Search(groups, importance, format, integers)
    blocks = search.best()
    alike = torch.zeros_like(blocks.s, dtype=torch.bool)
    while True:
        scale, minimum = blocks.d * blocks.s, blocks.m * blocks.n
        numbers = search.numbers(scale, minimum)
        apart = (numbers * scale - minimum - groups).abs_()
        far = apart.amax(-1, keepdim=True) > groups.abs().amax(-1, keepdim=True)
        if not (far & ~alike).any():
            break
        # Weights that multiply nothing are as far off as that: all of their group count alike.
        alike |= far
        some = far.flatten(1).any(1)
        importance[some] = torch.where(alike[some], importance[some].amax(-1, keepdim=True), importance[some])
        for part, other in zip(
            blocks, _Search(groups[some], importance[some], format, integers).best(), strict=True
        ):
            part[some] = other
    apart = apart.view(weight.shape).sum(-1)
    codes = search.codes(numbers).view(weight.shape)
    parts = (blocks.s, blocks.n) if integers.minima else (blocks.s,)
    integers_of_groups = (torch.cat(parts, -1) + integers.centre).to(torch.uint8)
    halves = torch.cat((blocks.d, blocks.m) if integers.minima else (blocks.d,), -1).half()
    rows = weight.shape[:-1]
    return (
        pack(codes, format.bits),
        pack_bytes(integers_of_groups.view(*rows, -1), integers.bits),
        halves.view(torch.int16).view(*rows, -1),
        torch.stack((apart, weight.abs().sum(-1)), -1),
    )


def _weighed(blocks: Tensor, importance: Tensor | None, shape: torch.Size) -> Tensor:
    """Importance [N, 256] of superblocks as it counts: times sqrt(2 mean(w^2) + w^2), as llama.cpp has it.

    Large weights err less, and trained models diverge less (docs/quality_moe.md). Without importance that
    wins nothing.
    """
    if importance is None:
        return torch.ones_like(blocks)
    importance = importance.expand(shape).reshape(blocks.shape)
    parts = blocks / blocks.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)  # no square is infinite
    squares = parts.square_()
    counts = counted(importance) * (2 * squares.mean(-1, keepdim=True) + squares).sqrt_()
    return torch.where(importance.mean(-1, keepdim=True) > 0, counts, 1.0)


class _Search:
    """Search for weights [N, groups, size] and their importance."""

    def __init__(self, weights: Tensor, importance: Tensor, format: Format, integers: Integers):
        self.w, self.k, self.bits = weights, importance, format.bits
        self.minima = integers.minima
        self.lowest, self.highest = -integers.centre, 2**integers.bits - 1 - integers.centre
        self.levels, self.offset, codes = format.row.levels, format.row.offset, 2**format.bits
        self.ends = LEVELS[:: codes - 1] if self.levels else (-self.offset, codes - 1 - self.offset)
        self.nearest = _nearest_levels().to(weights.device) if self.levels else None

    # Codes

    def numbers(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Numbers of the nearest codes."""
        x = (self.w + minimum if self.minima else self.w) * _inverse(scale)
        if self.nearest is None:
            return x.round_().clamp_(*self.ends)
        # Halfway between two levels is a multiple of 1 / 2.
        steps = x.mul_(2).floor_().clamp_(2 * LEVELS[0], 2 * LEVELS[-1]).sub_(2 * LEVELS[0])
        return self.nearest.index_select(0, steps.int().flatten()).view(x.shape)

    def codes(self, numbers: Tensor) -> Tensor:
        if self.levels:
            levels = torch.tensor(LEVELS, dtype=torch.float32, device=numbers.device)
            return torch.searchsorted(levels, numbers).byte()
        return (numbers + self.offset).byte()

    def error(self, blocks: Superblocks) -> Tensor:
        """Weighted squared errors [N, groups, 1]."""
        return self.error_of(blocks.d * blocks.s, blocks.m * blocks.n)

    def error_of(self, scale: Tensor, minimum: Tensor) -> Tensor:
        decoded = self.numbers(scale, minimum).mul_(scale)
        if self.minima:
            decoded.sub_(minimum)
        return self.sum(decoded.sub_(self.w).square_())

    def sum(self, values: Tensor) -> Tensor:
        """Sums of values times importance, of every group; the values are overwritten."""
        return values.mul_(self.k).sum(-1, keepdim=True)

    # The three steps

    def best(self) -> Superblocks:
        scale, minimum = self.lines() if self.minima else self.scales()
        blocks = self.with_integers(scale, minimum)
        error = self.error(blocks)
        for _ in range(ROUNDS):
            blocks, error = self.with_best_integers(blocks, error)
            other = self.with_fitted_halves(blocks)
            its_error = self.error(other)
            better = its_error.sum(1, keepdim=True) < error.sum(1, keepdim=True)
            d, m = torch.where(better, other.d, blocks.d), torch.where(better, other.m, blocks.m)
            blocks, error = blocks._replace(d=d, m=m), torch.where(better, its_error, error)
        return blocks

    def lines(self) -> tuple[Tensor, Tensor]:
        """Scales and minima, which are not negative."""
        room = [torch.empty_like(self.w) for _ in range(4)]
        low, high, scale, bias, _ = fitted_lines(self.w, self.k, self.bits, room)
        minimum = scale * 2 ** (self.bits - 1) - bias
        whole = high.clamp(min=0) / (2**self.bits - 1)
        through_zero = self.fitted(self.numbers(whole, torch.zeros_like(whole)))
        scale = torch.where(minimum < 0, through_zero, scale)
        alike = ~scale.isfinite()  # weights that are have no line
        return torch.where(alike, whole, scale), torch.where(alike, -low, minimum).clamp_(min=0)

    def scales(self) -> tuple[Tensor, Tensor]:
        """Scales of either sign."""
        largest = self.w.gather(-1, self.w.abs().argmax(-1, keepdim=True))
        zero = torch.zeros_like(largest)
        scale, least = zero, torch.full_like(zero, torch.inf)
        step = 8 if self.levels else 1
        for end, start in product(self.ends, STARTS):
            fitted = self.fitted(self.numbers(largest / (end + start * step), zero))
            error = self.error_of(fitted, zero)
            scale = torch.where(error < least, fitted, scale)
            least = torch.minimum(error, least)
        return scale, zero

    def fitted(self, numbers: Tensor) -> Tensor:
        """Scales of least error without minima; 0 for numbers that are all 0."""
        square = self.sum(numbers.square())
        return torch.where(square > 0, self.sum(numbers * self.w) / square, 0.0)

    def with_integers(self, scale: Tensor, minimum: Tensor) -> Superblocks:
        extreme = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        # The least of the integers of either sign has the largest magnitude.
        d = _half(extreme / (self.highest if self.minima else self.lowest))
        m = _half(minimum.amax(1, keepdim=True) / self.highest)
        s, n = (
            _divided(values, half, self.lowest, self.highest) for values, half in ((scale, d), (minimum, m))
        )
        return Superblocks(d, m, s, n)

    def with_best_integers(self, blocks: Superblocks, error: Tensor) -> tuple[Superblocks, Tensor]:
        """(blocks, error) with integers of scales and minima one step away where these err less."""
        best_s, best_n = blocks.s, blocks.n
        for a, b in product((-1, 0, 1), (-1, 0, 1) if self.minima else (0,)):
            s = (blocks.s + a).clamp_(self.lowest, self.highest)
            n = (blocks.n + b).clamp_(0, self.highest) if b else blocks.n
            its_error = self.error(blocks._replace(s=s, n=n)) if a or b else error
            better = its_error < error
            best_s, best_n = torch.where(better, s, best_s), torch.where(better, n, best_n)
            error = torch.where(better, its_error, error)
        return blocks._replace(s=best_s, n=best_n), error

    def with_fitted_halves(self, blocks: Superblocks) -> Superblocks:
        """d and m by least squares: weights are d * p - m * n for p = number * s."""
        p = self.numbers(blocks.d * blocks.s, blocks.m * blocks.n).mul_(blocks.s)

        def total(values: Tensor) -> Tensor:
            return self.sum(values).sum(1, keepdim=True)

        pp, pw = total(p.square()), total(p * self.w)
        d = torch.where(pp > 0, pw / pp, 0.0)
        if not self.minima:
            return blocks._replace(d=_half(d))
        nn = (self.k.sum(-1, keepdim=True) * blocks.n.square()).sum(1, keepdim=True)
        pn, nw = ((self.sum(v) * blocks.n).sum(1, keepdim=True) for v in (p.clone(), self.w.clone()))
        determinant = pp * nn - pn * pn
        both = determinant > 1e-6 * pp * nn
        d = torch.where(both, (pw * nn - pn * nw) / determinant, d)
        m = torch.where(both, (pn * pw - pp * nw) / determinant, 0.0)
        return blocks._replace(d=_half(d.clamp(min=0)), m=_half(m.clamp(min=0)))


def _half(values: Tensor) -> Tensor:
    return values.clamp(-LARGEST_HALF, LARGEST_HALF).half().float()


def _divided(values: Tensor, by: Tensor, lowest: int, highest: int) -> Tensor:
    return (values * _inverse(by)).round_().clamp_(lowest, highest)


def _inverse(values: Tensor) -> Tensor:
    """Inverses; 0 where they would not be finite."""
    return torch.where(values.abs() < SMALLEST, 0.0, 1 / values)


def _nearest_levels() -> Tensor:
    """The nearest of LEVELS to all numbers from j / 2 to (j + 1) / 2, for every j from the first level on."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    middles = (torch.arange(2 * LEVELS[0], 2 * LEVELS[-1] + 1) + 0.5) / 2
    return levels[(middles[:, None] - levels).abs().argmin(1)]
