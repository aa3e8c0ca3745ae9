"""ggml's blocks, as GGUF files hold them, taken apart into the tensors of the formats of the same name.

A block is the bytes of 32, 64 or 256 neighbouring values of a row: codes, and what their scales are made of.
The values are those of the blocks, in float32; the tensors take as many bytes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops._checks import Check
from ..ops._formats import FORMATS, LARGE_BLOCK, Format, QuantizedWeight, pack, pack_octets
from .formats import ErrorSums

# A block's codes [n, values], what goes into the scales [n, bytes] and into the biases [n, halves].
Parts = tuple[Tensor, Tensor, Tensor | None]
VALUES_AT_ONCE = 1 << 20


def _runs(octets: Tensor, length: int, shifts: tuple[int, ...], bits: int) -> Tensor:
    """The codes that lie one above the other in the bytes of each run of `length`: the lowest come first."""
    runs, mask = octets.unflatten(-1, (-1, 1, length)), (1 << bits) - 1
    return torch.cat([(runs >> shift) & mask for shift in shifts], dim=-2).flatten(-3)


def _nibbles(octets: Tensor, length: int) -> Tensor:
    return _runs(octets, length, (0, 4), 4)


def _halves(octets: Tensor) -> Tensor:
    return octets.contiguous().view(torch.int16)


def _q4(blocks: Tensor, count: int) -> Parts:
    """q4_0, q4_1 and iq4_nl: `count` halves, nibbles."""
    scales, codes = blocks.split((2 * count, 16), -1)
    return _nibbles(codes, 16), *_one_or_two(scales)


def _q5(blocks: Tensor, count: int) -> Parts:
    scales, fifth, low = blocks.split((2 * count, 4, 16), -1)
    return _nibbles(low, 16) | _runs(fifth, 1, tuple(range(8)), 1) << 4, *_one_or_two(scales)


def _one_or_two(octets: Tensor) -> tuple[Tensor, Tensor | None]:
    halves = _halves(octets)
    return halves[:, :1], halves[:, 1:] if halves.shape[1] > 1 else None


def _q8_0(blocks: Tensor) -> Parts:
    scales, codes = blocks.split((2, 32), -1)
    return codes ^ 128, _halves(scales), None


def _mxfp4(blocks: Tensor) -> Parts:
    scales, codes = blocks.split((1, 16), -1)
    return _nibbles(codes, 16), scales, None


def _nvfp4(blocks: Tensor) -> Parts:
    """The sign of a scale counts nothing, and the largest stands for 0."""
    scales, codes = blocks.split((4, 32), -1)
    return _nibbles(codes, 8), torch.where(scales == 127, 0, scales & 127), None


def _six_bit_pairs(octets: Tensor) -> Tensor:
    """Of q4_k and q5_k: the factors of eight scales and minima, alternating, in 6 bits each."""
    low, minima, rest = octets.split((4, 4, 4), -1)
    factors = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), -1)
    return pack_octets(torch.stack((factors, minima), -1).flatten(-2), 6)


def _q4_k(blocks: Tensor) -> Parts:
    halves, scales, codes = blocks.split((4, 12, 128), -1)
    return _nibbles(codes, 32), _six_bit_pairs(scales), _halves(halves)


def _q5_k(blocks: Tensor) -> Parts:
    halves, scales, fifth, low = blocks.split((4, 12, 32, 128), -1)
    codes = _nibbles(low, 32) | _runs(fifth, 32, tuple(range(8)), 1) << 4
    return codes, _six_bit_pairs(scales), _halves(halves)


def _q6_k(blocks: Tensor) -> Parts:
    low, high, scales, halves = blocks.split((128, 64, 16, 2), -1)
    codes = _nibbles(low, 64) | _runs(high, 32, (0, 2, 4, 6), 2) << 4
    return codes, scales ^ 128, _halves(halves)


def _q2_k(blocks: Tensor) -> Parts:
    scales, codes, halves = blocks.split((16, 64, 4), -1)
    return _runs(codes, 32, (0, 2, 4, 6), 2), scales, _halves(halves)


def _q3_k(blocks: Tensor) -> Parts:
    third, low, scales, halves = blocks.split((32, 64, 12, 2), -1)
    codes = _runs(low, 32, (0, 2, 4, 6), 2) | _runs(third, 32, tuple(range(8)), 1) << 2
    factors = _nibbles(scales[:, :8], 8) | _runs(scales[:, 8:], 4, (0, 2, 4, 6), 2) << 4
    return codes, pack_octets(factors, 6), _halves(halves)


def _iq4_xs(blocks: Tensor) -> Parts:
    halves, high, low, codes = blocks.split((2, 2, 4, 128), -1)
    factors = _runs(low, 1, (0, 4), 4) | _runs(high, 1, (0, 2, 4, 6), 2) << 4
    return _nibbles(codes, 16), pack_octets(factors, 6), _halves(halves)


# Bytes of a block, and what takes it apart.
_BLOCKS: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "q4_0": (18, lambda blocks: _q4(blocks, 1)),
    "q4_1": (20, lambda blocks: _q4(blocks, 2)),
    "q5_0": (22, lambda blocks: _q5(blocks, 1)),
    "q5_1": (24, lambda blocks: _q5(blocks, 2)),
    "q8_0": (34, _q8_0),
    "q2_k": (84, _q2_k),
    "q3_k": (110, _q3_k),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
    "iq4_nl": (18, lambda blocks: _q4(blocks, 1)),
    "iq4_xs": (136, _iq4_xs),
    "mxfp4": (17, _mxfp4),
    "nvfp4": (36, _nvfp4),
}


def format_of_blocks(name: str) -> Format | None:
    """The format that holds blocks of ggml's type `name`, in any case; None where there is none."""
    return FORMATS[name.lower()] if name.lower() in _BLOCKS else None


# Types whose values come from tables of patterns: the bits of the affine format that is nearest, and how many
# steps there may be between the least and the largest value of a group. Mean errors for random patterns: none
# for iq1_s, iq3_s, tq1_0 and tq2_0, 1 % for iq3_xxs, 2 % for iq2_xxs, 4 % for iq1_m, 5 % for the other two.
_NEAREST = {
    **dict.fromkeys(("iq1_s", "tq1_0", "tq2_0"), (2, range(2, 4))),
    "iq2_xxs": (3, range(3, 8)),
    **dict.fromkeys(("iq1_m", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (4, range(8, 16))),
}
_NEAREST_GROUP = 32


def nearest_format(name: str) -> Format | None:
    """The affine format for blocks of ggml's type `name` that no format holds; None where there is none."""
    bits, _ = _NEAREST.get(name.lower(), (0, ()))
    return Format(bits, _NEAREST_GROUP) if bits else None


@torch.no_grad()
def nearest_of(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, some: Callable[[slice], Tensor]
) -> tuple[QuantizedWeight, float]:
    """The weight [..., R, C] nearest to values of ggml's type `name`, and its error as a report has it.

    Args:
        dtype: of scales and biases.
        some: float32 values [n, C] of some of the rows of all matrices.
    """
    (bits, steps), errors = _NEAREST[name.lower()], ErrorSums()
    format = Format(bits, _NEAREST_GROUP)
    out = QuantizedWeight.empty(shape, dtype, torch.device("cpu"), format)
    for rows, (words, scales, biases) in _some_rows(out, shape[-1]):
        groups = some(rows).unflatten(-1, (-1, _NEAREST_GROUP))
        codes, scale, bias = _fitted(groups, steps, (1 << bits) - 1)
        scales.copy_(scale.squeeze(-1))
        biases.copy_(bias.squeeze(-1))
        words.view(torch.int32).copy_(pack(codes.byte().flatten(-2), bits))
        errors.add(groups, codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1))
    return out, errors.relative


def _some_rows(weight: QuantizedWeight, columns: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Some of the rows of all matrices at a time, and what the weight's tensors have of them."""
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in weight if tensor is not None]
    step = max(1, VALUES_AT_ONCE // max(1, columns))
    for first in range(0, len(flat[0]), step):
        rows = slice(first, first + step)
        yield rows, [tensor[rows] for tensor in flat]


def _fitted(groups: Tensor, steps: Iterable[int], most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and biases of groups [..., n]: the best of some numbers of steps, by least squares."""
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    means = groups.mean(-1, keepdim=True)
    best: tuple[Tensor, ...] | None = None
    for count in steps:
        scale, bias = ((largest - least) / count).clamp(min=1e-30), least
        for _ in range(2):
            codes = ((groups - bias) / scale).round_().clamp_(0, most)
            centred = codes - codes.mean(-1, keepdim=True)
            fit = (centred * (groups - means)).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
            scale = torch.where(fit > 0, fit, scale)  # NaN for equal values, which the bias holds
            bias = means - scale * codes.mean(-1, keepdim=True)
        error = (codes * scale + bias - groups).abs_().sum(-1, keepdim=True)
        found: tuple[Tensor, ...] = error, codes, scale, bias
        if best is not None:
            found = tuple(
                torch.where(error < best[0], new, old) for new, old in zip(found, best, strict=True)
            )
        best = found
    assert best is not None
    _, codes, scale, bias = best
    return codes, scale, bias


def block_values(format: Format) -> int:
    """How many values of a row a block holds."""
    return LARGE_BLOCK if format.multiple == LARGE_BLOCK else 64 if format.name == "nvfp4" else 32


def from_blocks(blocks: Tensor, format: Format) -> QuantizedWeight:
    """Take the blocks of a matrix, or of a stack, apart.

    Args:
        blocks: uint8 [..., R, bytes of a row], any strides.
        format: what the blocks are, from format_of_blocks.

    Returns: QuantizedWeight [..., R, C] on the device of `blocks`. The values are ggml's, to the bit but for
        the sign of zeros. Memory other than the result stays under about 25 MiB.

    Raises: ValueError for bytes that are no whole blocks.
    """
    check = Check("from_blocks")
    check.dtype("blocks", blocks, (torch.uint8,))
    size, _ = _BLOCKS[format.name]
    if blocks.shape[-1] % size != 0:
        check.fail("blocks", f"of rows that are a multiple of {size} bytes", tuple(blocks.shape))
    rows = blocks.reshape(-1, blocks.shape[-1])
    shape = (*blocks.shape[:-1], blocks.shape[-1] // size * block_values(format))
    return blocks_of(shape, format, rows.__getitem__, blocks.device)


@torch.no_grad()
def blocks_of(
    shape: tuple[int, ...], format: Format, some: Callable[[slice], Tensor], device: Any = "cpu"
) -> QuantizedWeight:
    """from_blocks for a weight [..., R, C] whose rows, of all matrices, are read some at a time."""
    size, take_apart = _BLOCKS[format.name]
    out = QuantizedWeight.empty(shape, torch.float16, torch.device(device), format)
    for rows, (words, *targets) in _some_rows(out, shape[-1]):
        codes, *scales = take_apart(some(rows).reshape(-1, size))
        words.view(torch.int32).copy_(pack(codes.flatten(), format.bits).view(-1, words.shape[1]))
        for target, part in zip(targets, scales, strict=False):
            if part is not None:
                target.copy_(part.reshape(-1, target.shape[1]))
    return out
