"""Formats of quantised weights by name, the shapes of their tensors, and values that codes stand for."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._text import one_of
from .._weight_formats import (
    BITS,
    DEFAULTS,
    GROUP_SIZES,
    LARGE_BLOCK,
    MODES,
    ROWS,
    Codebook,
    Floats,
    FormatRow,
    Halves,
    Integers,
    LikeActivations,
)
from ._checks import ACTIVATION_DTYPES, Check, wide

# The tensors of a quantised weight.
ARGUMENTS = ("packed", "scales", "zeros")  # names of an operator's tensors, and of QuantizedWeight's
TENSORS = ("packed", "scales", "biases")  # attributes of a layer, as checkpoints name them


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INFINITE_E8M0 = 255  # the code of infinity in e8m0


_QUANTIZE = Check("quantize")


@dataclass(frozen=True, init=False)
class Format:
    """Quantisation format: a row of the table above.

    In mode "affine" a `bits` of None becomes 4, and a group_size of None 64; every other mode has one of
    both.
    """

    bits: int
    group_size: int
    mode: str
    name: str  # "affine4_64", "mxfp4": in operators, reports, config.json and Metal libraries

    def __init__(self, bits: int | None = None, group_size: int | None = None, mode: str = "affine"):
        _QUANTIZE.choice("mode", mode, MODES)
        for argument, value, allowed in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
            if value is not None and (type(value) is not int or value not in allowed[mode]):
                expected = f"{one_of(allowed[mode])} for mode {mode}"
                _QUANTIZE.fail(argument, expected, repr(value))
        usual_bits, usual_size = DEFAULTS[mode]
        bits = usual_bits if bits is None else bits
        group_size = usual_size if group_size is None else group_size
        name = f"affine{bits}_{group_size}" if mode == "affine" else mode
        self._set(bits=bits, group_size=group_size, mode=mode, name=name)

    def _set(self, **fields: Any) -> None:
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @classmethod
    def _of_row(cls, name: str, row: FormatRow) -> "Format":
        """Also for a row that nothing is quantised to, so that no mode of a user's names it."""
        format = object.__new__(cls)
        is_affine = isinstance(row.scales, LikeActivations)
        mode = "affine" if is_affine else name
        format._set(bits=row.bits, group_size=row.group_size, mode=mode, name=name)
        return format

    @property
    def row(self) -> FormatRow:
        return ROWS[self.name]

    def to_dict(self) -> dict[str, Any]:
        """The arguments by which a user asks for this format."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str, check: Check = _QUANTIZE, argument: str = "format") -> "Format":
        """The format of this name.

        Raises: ValueError, which names `check` and the argument, for a name that no format has.
        """
        if not isinstance(name, str) or name not in FORMATS:
            check.fail(argument, "a name such as affine4_64 or mxfp4", repr(name))
        return FORMATS[name]

    @property
    def is_affine(self) -> bool:
        return self.mode == "affine"

    @property
    def codebook(self) -> Codebook | None:
        """The scales of a codebook format, else None."""
        return self.row.scales if isinstance(self.row.scales, Codebook) else None

    @property
    def integers(self) -> Integers | None:
        """The scales of a format that has integers as scales, else None."""
        return self.row.scales if isinstance(self.row.scales, Integers) else None

    @property
    def number_type(self) -> str:
        """The type of codes that are floats, e2m1 or e4m3, else ""."""
        return self.row.scales.number if isinstance(self.row.scales, Floats) else ""

    @property
    def scale_type(self) -> str:
        """The type of their scales, e8m0, e4m3 or fp32, else ""."""
        return self.row.scales.scale if isinstance(self.row.scales, Floats) else ""

    @property
    def has_zeros(self) -> bool:
        scales = self.row.scales
        has_minima = isinstance(scales, Halves) and scales.minima
        return self.is_affine or self.stream_bits > 0 or has_minima or self.has_global

    @property
    def has_global(self) -> bool:
        """True if zeros are a float32 factor of each row, [..., R, 1]."""
        return isinstance(self.row.scales, Floats) and self.row.scales.has_global

    @property
    def stream_bits(self) -> int:
        """Bits that 32 values take in `scales` where these are a stream of bits, else 0."""
        if self.codebook is not None:
            return self.codebook.stream_bits
        return 0 if self.integers is None else 32 // self.group_size * self.integers.bits * self.halves

    @property
    def halves(self) -> int:
        """Float16 numbers of a superblock."""
        return 1 if self.integers is None else self.integers.halves

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.is_affine:
            return ACTIVATION_DTYPES
        if self.scale_type == "fp32":
            return (torch.int32,)
        return (torch.uint8,) if self.stream_bits > 0 or self.scale_type else (torch.int16,)

    @property
    def zero_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.is_affine:
            return ACTIVATION_DTYPES
        return (torch.int32,) if self.has_global else (torch.int16,)

    @property
    def multiple(self) -> int:
        """The number that the input dimension must be a multiple of."""
        return LARGE_BLOCK if isinstance(self.row.scales, Integers | Codebook) else self.group_size

    def scales_of(self, columns: int) -> tuple[int, int]:
        """The elements of `scales` and of `zeros` for a row."""
        blocks = columns // LARGE_BLOCK
        if self.stream_bits:
            return blocks * self.stream_bits, blocks * self.halves
        count = columns // self.group_size if self.codebook is None else blocks
        if self.has_global:
            return count, 1
        return count, count if self.has_zeros else 0

    def packed_columns(self, columns: int) -> int:
        return columns * self.bits // 32

    def columns(self, packed: int) -> int:
        return packed * 32 // self.bits

    def replaced(self, bits: int | None, group_size: int | None, mode: str | None) -> "Format":
        """This format with the given numbers changed. Another mode starts from its own defaults."""
        if mode is None or mode == self.mode:
            mode = self.mode
            bits = self.bits if bits is None else bits
            group_size = self.group_size if group_size is None else group_size
        return Format(bits, group_size, mode)

    def check_columns(self, check: Check, argument: str, columns: int) -> None:
        if columns % self.multiple != 0:
            check.fail(argument, f"a multiple of {self.multiple}", columns)

    def check_scales(
        self,
        check: Check,
        prefix: str,
        scales: Tensor,
        zeros: Tensor | None,
        shape: tuple[int, ...],
        meaning: str,
    ) -> None:
        """`shape`: of the dense weights; `meaning` names its dimensions, such as "E, N, H"."""
        check.none(f"for format {self.name}", not self.has_zeros, **{f"{prefix}zeros": zeros})
        *rows, columns = shape
        counts = self.scales_of(columns)
        names = [f"[{meaning} / {self.group_size}]"] * 2
        if self.multiple == LARGE_BLOCK:
            names = [f"[{meaning} * {count} / {LARGE_BLOCK}]" for count in self.scales_of(LARGE_BLOCK)]
        elif self.has_global:
            names[1] = f"[{meaning.rpartition(', ')[0]}, 1]"
        check.tensor(f"{prefix}scales", scales, (*rows, counts[0]), names[0], self.scale_dtypes)
        if not self.has_zeros:
            return
        if zeros is None:
            check.fail(f"{prefix}zeros", f"a tensor for format {self.name}", None)
        dtypes = (scales.dtype,) if self.is_affine else self.zero_dtypes
        check.tensor(f"{prefix}zeros", zeros, (*rows, counts[1]), names[1], dtypes)


FORMATS = {name: Format._of_row(name, row) for name, row in ROWS.items()}


@functools.cache
def _e4m3_values() -> tuple[float, ...]:
    """No code is infinite or NaN: 0x7f is 480, as in the Metal kernels. quantize never writes it."""
    magnitudes = [
        code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(128)
    ]
    return tuple(magnitudes + [-value for value in magnitudes])


def e8m0(scales: Tensor) -> Tensor:
    """2^(scale - 127) from its bits: 0 is the subnormal 2^-127, INFINITE_E8M0 is inf, as in MLX."""
    exponent = scales.int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def scale_values(scales: Tensor, format: Format) -> Tensor:
    """Scales of codes that are floats, in float32."""
    if format.scale_type == "fp32":
        return scales.view(torch.float32)
    return e4m3(scales) if format.scale_type == "e4m3" else e8m0(scales)


def e4m3(codes: Tensor) -> Tensor:
    table = torch.tensor(_e4m3_values(), dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _pairs_by_table(data: Tensor, values: tuple[float, ...]) -> Tensor:
    """Looks up two 4-bit codes at a time: 3 times as fast as shifting and converting, 19 times for e2m1."""
    value = torch.tensor(values, dtype=torch.float32, device=data.device)
    pairs = torch.stack((value.repeat(16), value.repeat_interleave(16)), dim=-1).view(torch.int64).flatten()
    chosen = pairs.index_select(0, data.flatten().int())
    return chosen.view(torch.float32).view(*data.shape[:-1], 2 * data.shape[-1])


def _repeated(mask: int, distance: int) -> int:
    return sum(mask << start for start in range(0, 64, distance))


def _spread(data: Tensor, bits: int) -> Tensor:
    """uint8 [..., C * bits / 8] -> uint8 [..., C], one code a byte; eight move together, as an int64."""
    if bits == 8:
        return data
    eights = data.new_zeros(*data.shape[:-1], data.shape[-1] // bits, 8)
    eights[..., :bits] = data.unflatten(-1, (-1, bits))
    codes = eights.view(torch.int64)
    for count in (4, 2, 1):  # how many codes move together
        lower = _repeated((1 << count * bits) - 1, 16 * count)
        upper = (codes << count * (8 - bits)).bitwise_and_(lower << 8 * count)
        codes.bitwise_and_(lower).bitwise_or_(upper)
    return eights.flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> int32 [..., C * bits / 32]."""
    return pack_bytes(codes, bits).view(torch.int32)


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> uint8 [..., C * bits / 8]: the inverse of _spread."""
    if bits < 8:
        codes = aligned(codes).view(torch.int64)
        for count in (1, 2, 4):
            lower = _repeated((1 << count * bits) - 1, 16 * count)
            upper = (codes >> count * (8 - bits)).bitwise_and_(lower << count * bits)
            codes = (codes & lower).bitwise_or_(upper)
        codes = codes.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)
    return aligned(codes)


def aligned(data: Tensor) -> Tensor:
    """Contiguous uint8 at an address that is one of each dtype."""
    data = data.contiguous()
    return data if data.storage_offset() % 8 == 0 else data.clone()


def _as_bytes(packed: Tensor) -> Tensor:
    """Packed codes [..., P] as bytes, uint8 [..., 4 * P]."""
    if packed.numel() == 0:  # contiguous with any strides, of which no view as bytes takes all
        return packed.new_empty((*packed.shape[:-1], 4 * packed.shape[-1]), dtype=torch.uint8)
    return packed.view(torch.int32).contiguous().view(torch.uint8)


def unpack(packed: Tensor, format: Format) -> Tensor:
    """Codes decoded to numbers: uint32 or int32 [..., P] -> float32 [..., columns], without scales."""
    data = _as_bytes(packed)
    if format.number_type == "e4m3":
        return e4m3(data)
    if format.bits == 4:
        table = LEVELS if format.row.levels else range(16)
        values = E2M1_VALUES if format.number_type == "e2m1" else tuple(map(float, table))
        return _pairs_by_table(data, values)
    return _spread(data, format.bits).float()


def decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, format: Format) -> Tensor:
    """Codes uint8 [..., group_size] with the scales and zeros [...] of their groups -> float32."""
    if zeros is not None:
        values = codes.float()
    elif format.number_type == "e4m3":
        values = e4m3(codes)
    else:
        table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
    return _scaled(values, scales, zeros, format)


def _scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, format: Format) -> Tensor:
    """Values of the numbers [..., group_size] of codes; in place, if scales are not float64."""
    if format.row.offset:  # before an infinite scale
        values.sub_(format.row.offset / format.row.step)
    if format.scale_type:
        values.mul_(scale_values(scales, format).unsqueeze(-1))
        return values if zeros is None else values.mul_(zeros.view(torch.float32).unsqueeze(-1))
    if not format.is_affine:
        scales, zeros = _scales_of_ggml(scales, zeros, format)
    scales = wide(scales)
    values = values.to(scales.dtype).mul_(scales.unsqueeze(-1))
    return values if zeros is None else values.add_(wide(zeros).unsqueeze(-1))


def _halves(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float16).float()


def _scales_of_ggml(scales: Tensor, zeros: Tensor | None, format: Format) -> tuple[Tensor, Tensor | None]:
    """The scales and zeros [..., groups] in float32."""
    integers = format.integers
    if integers is None or zeros is None:
        return _halves(scales) * format.row.step, None if zeros is None else _halves(zeros)
    count, groups = integers.halves, LARGE_BLOCK // format.group_size
    numbers = _spread(scales.contiguous(), integers.bits).unflatten(-1, (-1, groups, count))
    products = (numbers.float() - integers.centre) * _halves(zeros).unflatten(-1, (-1, 1, count))
    factors, *minima = products.flatten(-3, -2).unbind(-1)
    return factors, -minima[0] if minima else None


@functools.cache
def grid_points(name: str) -> Tensor:
    """The points [n, values] of a type's grid, in float32."""
    for line in (Path(__file__).parents[1] / "shaders/matmul/grids.txt").read_text().splitlines():
        start, values, levels, digits = line.split(" ", 3)
        if start != "#" and name.startswith(start):
            level = torch.tensor([float(number) for number in levels.split(",")], dtype=torch.float32)
            data = torch.tensor([int(digit, 16) for digit in digits], dtype=torch.uint8)
            points = _flags(data)[..., :4].flatten().nonzero()
            return level[points // len(level) ** torch.arange(int(values)) % len(level)]
    raise KeyError(name)


def _flags(data: Tensor) -> Tensor:
    """uint8 [...] -> uint8 [..., 8]: the lowest first."""
    return data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1


def _number(bits: Tensor) -> Tensor:
    """[..., n] -> int32 [...]."""
    places = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device)
    return (bits.int() << places).sum(-1, dtype=torch.int32)


def _grid_values(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, format: Format, grid: Codebook
) -> Tensor:
    """Dequantised values of a codebook format, [..., blocks of 32 values, 32]."""
    table = grid_points(format.name).to(packed.device)
    groups, points = 32 // format.group_size, 32 // table.shape[1]
    data = _as_bytes(packed).unflatten(-1, (-1, 4 * format.bits))
    more = data.new_empty(*data.shape[:-1], 0)
    if zeros is not None:
        stream = _flags(scales).flatten(-2).unflatten(-1, (-1, 8 * grid.stream_bits))
        parts = stream.split((128, 48) if format.name == "iq1_m" else 8 * grid.stream_bits, -1)
        more = torch.cat([part.unflatten(-1, (8, -1)) for part in reversed(parts)], -1).flatten(-3, -2)
    if format.bits > 1:
        signs = _flags(data[..., -4:]).flatten(-2).unflatten(-1, (2, 4, 4)).transpose(-3, -1)
        signs = signs.flatten(-2)  # [..., eights, values]
        if grid.stream_bits < 12:
            more = torch.cat((more, signs[..., 7]), -1)
            signs[..., 7] = signs[..., :7].sum(-1) & 1
    counts = [groups * grid.scale_bits, points * grid.number_bits, grid.flags]
    scale, upper, shifts = more.split(counts, -1)
    numbers = data[..., :points] + (_number(upper.unflatten(-1, (points, -1))) << 8)
    values = table[numbers.long()]
    if format.bits > 1:
        values *= 1.0 - 2.0 * signs.view(values.shape)
    else:
        values += (0.125 - 0.25 * shifts).unsqueeze(-1)
    factors = 2 * _number(scale.unflatten(-1, (groups, -1))) + 1
    halves = _halves(scales if zeros is None else zeros)
    factors = factors.unflatten(-2, (-1, 8)) * (halves / (1, 8, 4)[format.bits - 1])[..., None, None]
    return (values.reshape(*factors.shape, format.group_size) * factors.unsqueeze(-1)).flatten(-4)


def dequantize_values(packed: Tensor, scales: Tensor, zeros: Tensor | None, format: Format) -> Tensor:
    """Dequantised values, float32 [..., columns], from packed codes [..., P] and scales [..., groups]."""
    if format.codebook is not None:
        return _grid_values(packed, scales, zeros, format, format.codebook)
    groups = unpack(packed, format).unflatten(-1, (-1, format.group_size))
    return _scaled(groups, scales, zeros, format).flatten(-2)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantised matrix [R, C], or a stack of them [E, R, C]; it unpacks into its three tensors.

    Attributes:
        packed: [..., R, C * bits / 32], uint32 or the same bits as int32: the codes.
        scales: [..., R, C / group_size], or of GGUF's formats what _weight_formats.py says.
        zeros: like `scales`, [..., R, 1] in nvfp4_global, or None where the format has none.
        format: how they are read.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: Format

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, format: Format
    ) -> "QuantizedWeight":
        """Uninitialised, for a dense weight of a shape and a dtype."""
        *rows, columns = shape
        packed = torch.empty(*rows, format.packed_columns(columns), dtype=torch.uint32, device=device)
        counts = format.scales_of(columns)
        scale_dtype = dtype if format.is_affine else format.scale_dtypes[0]
        scales = torch.empty(*rows, counts[0], dtype=scale_dtype, device=device)
        if not format.has_zeros:
            return cls(packed, scales, None, format)
        zero_dtype = dtype if format.is_affine else format.zero_dtypes[0]
        return cls(packed, scales, torch.empty(*rows, counts[1], dtype=zero_dtype, device=device), format)

    @classmethod
    def among(cls, given: dict[str, Any], prefix: str, format: Format) -> "QuantizedWeight":
        """The weight whose tensors are arguments with a prefix."""
        packed, scales, zeros = (given[f"{prefix}{name}"] for name in ARGUMENTS)
        return cls(packed, scales, zeros, format)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.packed, self.scales, self.zeros))

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Applies a function to each tensor that is not None."""
        zeros = None if self.zeros is None else function(self.zeros)
        return QuantizedWeight(function(self.packed), function(self.scales), zeros, self.format)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    def check(self, check: Check, prefix: str, shape: tuple[int, ...], meaning: str) -> None:
        """`shape` is the shape of the dense weight; `meaning` names its dimensions, such as "E, N, H"."""
        format = self.format
        *rows, columns = shape
        rows_name, _, columns_name = meaning.rpartition(", ")
        format.check_columns(check, f"{columns_name}, the input dimension of {prefix}packed,", columns)
        expected = f"[{rows_name}, {columns_name} * {format.bits} / 32]"
        check.shape(f"{prefix}packed", self.packed, (*rows, format.packed_columns(columns)), expected)
        format.check_scales(check, prefix, self.scales, self.zeros, shape, meaning)

    def values(self, index: int | slice | Tensor) -> Tensor:
        """A matrix of the stack or some rows of the matrix, dequantised to float32."""
        zeros = None if self.zeros is None else self.zeros[index]
        packed = self.packed.view(torch.int32)[index]  # uint32 cannot be indexed by a tensor
        return dequantize_values(packed, self.scales[index], zeros, self.format)
