"""Unpacks ggml's blocks, as in GGUF files, into the tensors of the formats of the same name.

A block holds 32, 64 or 256 neighbouring values of a row: their codes, and the parts of their scales.
Decoded values equal the blocks' in float32; the tensors take as many bytes as the blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops._checks import Check
from ..ops._formats import FORMATS, Format, QuantizedWeight, aligned, pack, pack_bytes

# A block's codes [n, values], what goes into the scales [n, bytes] and into the biases [n, halves].
Parts = tuple[Tensor, Tensor, Tensor | None]
VALUES_AT_ONCE = 1 << 20


def _runs(data: Tensor, length: int, shifts: tuple[int, ...], bits: int) -> Tensor:
    """Codes that share the bytes of each run of `length`, lowest bits first."""
    runs, mask = data.unflatten(-1, (-1, 1, length)), (1 << bits) - 1
    return torch.cat([(runs >> shift) & mask for shift in shifts], dim=-2).flatten(-3)


def _nibbles(data: Tensor, length: int) -> Tensor:
    return _runs(data, length, (0, 4), 4)


def _halves(data: Tensor) -> Tensor:
    return aligned(data).view(torch.int16)


def _q4(scales: Tensor, codes: Tensor) -> Parts:
    """q4_0, q4_1 and iq4_nl: one half or two, nibbles."""
    return _nibbles(codes, 16), *_one_or_two(scales)


def _q5(scales: Tensor, fifth: Tensor, low: Tensor) -> Parts:
    return _nibbles(low, 16) | _runs(fifth, 1, tuple(range(8)), 1) << 4, *_one_or_two(scales)


def _one_or_two(data: Tensor) -> tuple[Tensor, Tensor | None]:
    halves = _halves(data)
    return halves[:, :1], halves[:, 1:] if halves.shape[1] > 1 else None


def _q8_0(scales: Tensor, codes: Tensor) -> Parts:
    return codes ^ 128, _halves(scales), None


def _q1_0(scales: Tensor, codes: Tensor) -> Parts:
    return _flags(codes), _halves(scales), None


def _q2_0(scales: Tensor, codes: Tensor) -> Parts:
    return _runs(codes, 1, (0, 2, 4, 6), 2), _halves(scales), None


def _mxfp4(scales: Tensor, codes: Tensor) -> Parts:
    return _nibbles(codes, 16), scales, None


def _nvfp4(scales: Tensor, codes: Tensor) -> Parts:
    """nvfp4: the sign of a scale is ignored, and the largest code is 0."""
    return _nibbles(codes, 8), torch.where(scales == 127, 0, scales & 127), None


def _six_bit_pairs(data: Tensor) -> Tensor:
    """The factors of eight scales and minima of q4_k and q5_k, alternating, in 6 bits each."""
    low, minima, rest = data.split((4, 4, 4), -1)
    factors = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), -1)
    return pack_bytes(torch.stack((factors, minima), -1).flatten(-2), 6)


def _q4_k(halves: Tensor, scales: Tensor, codes: Tensor) -> Parts:
    return _nibbles(codes, 32), _six_bit_pairs(scales), _halves(halves)


def _q5_k(halves: Tensor, scales: Tensor, fifth: Tensor, low: Tensor) -> Parts:
    codes = _nibbles(low, 32) | _runs(fifth, 32, tuple(range(8)), 1) << 4
    return codes, _six_bit_pairs(scales), _halves(halves)


def _q6_k(low: Tensor, high: Tensor, scales: Tensor, halves: Tensor) -> Parts:
    codes = _nibbles(low, 64) | _runs(high, 32, (0, 2, 4, 6), 2) << 4
    return codes, scales ^ 128, _halves(halves)


def _q2_k(scales: Tensor, codes: Tensor, halves: Tensor) -> Parts:
    return _runs(codes, 32, (0, 2, 4, 6), 2), scales, _halves(halves)


def _q3_k(third: Tensor, low: Tensor, scales: Tensor, halves: Tensor) -> Parts:
    codes = _runs(low, 32, (0, 2, 4, 6), 2) | _runs(third, 32, tuple(range(8)), 1) << 2
    factors = _nibbles(scales[:, :8], 8) | _runs(scales[:, 8:], 4, (0, 2, 4, 6), 2) << 4
    return codes, pack_bytes(factors, 6), _halves(halves)


def _iq4_xs(halves: Tensor, high: Tensor, low: Tensor, codes: Tensor) -> Parts:
    factors = _runs(low, 1, (0, 4), 4) | _runs(high, 1, (0, 2, 4, 6), 2) << 4
    return _nibbles(codes, 16), pack_bytes(factors, 6), _halves(halves)


def _tq2_0(codes: Tensor, halves: Tensor) -> Parts:
    return _runs(codes, 32, (0, 2, 4, 6), 2), _halves(halves), None


def _tq1_0(long: Tensor, short: Tensor, four: Tensor, halves: Tensor) -> Parts:
    """Five digits of base 3 in a byte, as a fraction: the first is the largest third that it fits in."""
    codes = []
    for data, digits in ((long, 5), (short, 5), (four, 4)):
        left = data.int()
        for _ in range(digits):
            codes.append(left * 3 >> 8)
            left = left * 3 & 255
    return torch.cat(codes, -1).byte(), _halves(halves), None


def _flags(data: Tensor) -> Tensor:
    """The bits [n, 8 * bytes], the lowest first."""
    return _runs(data, 1, tuple(range(8)), 1)


def _points(numbers: Tensor, signs: Tensor) -> Tensor:
    """Packed codes of eight times 32 values, as bytes.

    Args:
        numbers: [n, 8, points], the lower eight bits.
        signs: flags [n, 256], signs or other bits, in the order of the values.
    """
    eights = signs.unflatten(-1, (8, 4, 4, 2))
    return torch.cat((numbers, pack_bytes(eights.transpose(-3, -1).flatten(-3), 1)), -1)


def _iq2_xxs(halves: Tensor, rest: Tensor) -> Parts:
    units = rest.unflatten(-1, (8, 8))
    return _points(units[..., :4], _sevens(units[..., 4:])), _halves(halves), None


def _iq3_xxs(halves: Tensor, numbers: Tensor, rest: Tensor) -> Parts:
    return _points(numbers.unflatten(-1, (8, 8)), _sevens(rest.unflatten(-1, (8, 4)))), _halves(halves), None


def _sevens(data: Tensor) -> Tensor:
    """Flags of four times seven signs, each followed by a bit of the four above all."""
    flags = _flags(data.flatten(-2)).unflatten(-1, (8, 32))
    return torch.cat((flags[..., :28].unflatten(-1, (4, 7)), flags[..., 28:].unsqueeze(-1)), -1).flatten(1)


def _iq2_xs(halves: Tensor, codes: Tensor, scales: Tensor) -> Parts:
    low, high = codes.unflatten(-1, (8, 4, 2)).unbind(-1)  # from 16 bits: nine of a number, seven signs
    flags = _flags(high.flatten(-2)).unflatten(-1, (-1, 8)).roll(-1, -1)
    return _points(low, flags.flatten(1)), scales, _halves(halves)


def _iq2_s(halves: Tensor, numbers: Tensor, signs: Tensor, high: Tensor, scales: Tensor) -> Parts:
    more = torch.stack((scales, high), -1).flatten(-2)
    return _points(numbers.unflatten(-1, (8, 4)), _flags(signs)), more, _halves(halves)


def _iq3_s(halves: Tensor, numbers: Tensor, high: Tensor, signs: Tensor, scales: Tensor) -> Parts:
    scales = _flags(scales).unflatten(-1, (8, 4))
    more = torch.cat((scales, _flags(high).unflatten(-1, (8, 8))), -1).flatten(1)
    return _points(numbers.unflatten(-1, (8, 8)), _flags(signs)), pack_bytes(more, 1), _halves(halves)


def _iq1_s(halves: Tensor, numbers: Tensor, more: Tensor) -> Parts:
    flags = _flags(more).unflatten(-1, (8, 16))  # 4 times 3 of numbers, s, a shift
    moved = torch.cat((flags[..., 12:15], flags[..., :12], flags[..., 15:]), -1).flatten(1)
    return numbers, pack_bytes(moved, 1), _halves(halves)


def _iq1_m(numbers: Tensor, more: Tensor, scales: Tensor) -> Parts:
    flags = _flags(more).unflatten(-1, (8, 4, 4))  # 3 of a number, a shift
    moved = torch.cat((flags[..., :3].flatten(-2), flags[..., 3]), -1).flatten(1)
    quarters = _flags(scales).unflatten(-1, (4, 16))  # 4 times 3 of s, four bits of the half
    parts = (pack_bytes(moved, 1), pack_bytes(quarters[..., :12].flatten(1), 1))
    return numbers, torch.cat(parts, -1), _halves(pack_bytes(quarters[..., 12:].flatten(1), 1))


# The bytes of the parts of a block, and what makes tensors of these parts [n, bytes].
_BLOCKS: dict[str, tuple[tuple[int, ...], Callable[..., Parts]]] = {
    "q4_0": ((2, 16), _q4),
    "q4_1": ((4, 16), _q4),
    "q5_0": ((2, 4, 16), _q5),
    "q5_1": ((4, 4, 16), _q5),
    "q8_0": ((2, 32), _q8_0),
    "q1_0": ((2, 16), _q1_0),
    "q2_0": ((2, 16), _q2_0),
    "q2_k": ((16, 64, 4), _q2_k),
    "q3_k": ((32, 64, 12, 2), _q3_k),
    "q4_k": ((4, 12, 128), _q4_k),
    "q5_k": ((4, 12, 32, 128), _q5_k),
    "q6_k": ((128, 64, 16, 2), _q6_k),
    "iq4_nl": ((2, 16), _q4),
    "iq4_xs": ((2, 2, 4, 128), _iq4_xs),
    "mxfp4": ((1, 16), _mxfp4),
    "nvfp4": ((4, 32), _nvfp4),
    "tq1_0": ((32, 16, 4, 2), _tq1_0),
    "tq2_0": ((64, 2), _tq2_0),
    "iq1_s": ((2, 32, 16), _iq1_s),
    "iq1_m": ((32, 16, 8), _iq1_m),
    "iq2_xxs": ((2, 64), _iq2_xxs),
    "iq2_xs": ((2, 64, 8), _iq2_xs),
    "iq2_s": ((2, 32, 32, 8, 8), _iq2_s),
    "iq3_xxs": ((2, 64, 32), _iq3_xxs),
    "iq3_s": ((2, 64, 8, 32, 4), _iq3_s),
}


def format_of_blocks(name: str) -> Format | None:
    """The format that holds blocks of ggml's type `name`, in any case; None where there is none."""
    return _format(name) if name.lower() in _BLOCKS else None


def _format(name: str) -> Format:
    """Format of a type; tq1_0 becomes tq2_0, which has the same values."""
    return FORMATS[name.lower().replace("tq1", "tq2")]


def _some_rows(weight: QuantizedWeight, columns: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields slices of all matrices' rows, and the weight's tensors at these rows."""
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in weight if tensor is not None]
    step = max(1, VALUES_AT_ONCE // max(1, columns))
    for first in range(0, len(flat[0]), step):
        rows = slice(first, first + step)
        yield rows, [tensor[rows] for tensor in flat]


def block_size(name: str) -> int:
    """Bytes of a block of ggml's type `name`."""
    return sum(_BLOCKS[name.lower()][0])


def block_values(format: Format) -> int:
    """Number of values in a block."""
    return 64 if format.name == "nvfp4" else max(32, format.multiple)


def from_blocks(blocks: Tensor, name: str) -> QuantizedWeight:
    """Unpacks the blocks of a matrix, or of a stack of matrices.

    Args:
        blocks: uint8 [..., R, bytes of a row], any strides.
        name: ggml's type of the blocks, one for which format_of_blocks has a format.

    Returns: QuantizedWeight [..., R, C] on the device of `blocks`. The values are ggml's, to the bit but for
        the sign of zeros; an mxfp4 scale of 255 is infinite, as in MLX, where ggml has 2^128. Memory other
        than the result stays under about 25 MiB.

    Raises: ValueError for bytes that are no whole blocks, and for another name.
    """
    check = Check("from_blocks")
    check.dtype("blocks", blocks, (torch.uint8,))
    if not isinstance(name, str) or name.lower() not in _BLOCKS:
        check.fail("name", f"one of {', '.join(_BLOCKS)}", repr(name))
    if blocks.dim() == 0:
        check.fail("blocks", "of one dimension or more", ())
    size = block_size(name)
    if blocks.shape[-1] % size != 0:
        check.fail("blocks", f"of rows that are a multiple of {size} bytes", tuple(blocks.shape))
    rows = blocks.reshape(-1, blocks.shape[-1])
    shape = (*blocks.shape[:-1], blocks.shape[-1] // size * block_values(_format(name)))
    return blocks_of(shape, name, rows.__getitem__, blocks.device)


@torch.no_grad()
def blocks_of(
    shape: tuple[int, ...], name: str, some: Callable[[slice], Tensor], device: Any = "cpu"
) -> QuantizedWeight:
    """from_blocks for a weight [..., R, C] whose rows, of all matrices, are read some at a time."""
    (sizes, made_of), format = _BLOCKS[name.lower()], _format(name)
    bits = format.bits if format.codebook is None else 8  # codebook formats come packed
    out = QuantizedWeight.empty(shape, torch.float16, torch.device(device), format)
    for rows, (packed, *targets) in _some_rows(out, shape[-1]):
        codes, *scales = made_of(*some(rows).reshape(-1, sum(sizes)).split(sizes, -1))
        packed.view(torch.int32).copy_(pack(codes.flatten(), bits).view(-1, packed.shape[1]))
        for target, part in zip(targets, scales, strict=False):
            if part is not None:
                target.copy_(part.reshape(-1, target.shape[1]))
    return out
