"""The formats of quantised weights: their names, the shapes of their tensors, and what the codes mean.

    mode    bits         group        value                      scales
    affine  1 to 6, 8    32, 64, 128  q * scale + bias           float32, float16, bfloat16; biases alike
    mxfp4   4            32           e2m1(q) * 2^(scale - 127)  uint8
    mxfp8   8            32           e4m3(q) * 2^(scale - 127)  uint8
    nvfp4   4            16           e2m1(q) * e4m3(scale)      uint8

All are laid out as mlx.core.quantize does: groups of consecutive values along the input dimension; the codes
of a row one after the other in 32-bit words, the first in the lowest bits, so that codes of 3, 5 and 6 bits
cross the ends of words. mxfp4 and mxfp8 are OCP microscaling formats.

The modes q2_k to q6_k and iq4_xs are formats of GGUF. These have ggml's values in the same layout: codes q in
words, and what their blocks hold beside them taken apart into two tensors. d and m are float16, whose bits
int16 tensors hold: casting a model to another dtype leaves them unchanged. s and n are unsigned integers of a
few bits.

    name              bits     group  value                              scales                    biases
    q4_0, q5_0, q8_0  4, 5, 8  32     (q - 8, 16, 128) * d               d                         none
    q2_0              2        64     (q - 1) * d                        d                         none
    q1_0              1        128    (2 q - 1) * d                      d                         none
    q4_1, q5_1        4, 5     32     q * d + m                          d                         m
    iq4_nl            4        32     level(q) * d                       d                         none
    q4_k, q5_k        4, 5     32     q * (d * s) - m * n                s and n, of 6 bits each   d, m of 256
    q2_k              2        16     q * (d * s) - m * n                s and n, of 4 bits each   d, m of 256
    q3_k              3        16     (q - 4) * (d * (s - 32))           s, of 6 bits              d of 256
    q6_k              6        16     (q - 32) * (d * (s - 128))         s, of 8 bits              d of 256
    iq4_xs            4        32     level(q) * (d * (s - 32))          s, of 6 bits              d of 256
    tq2_0             2        256    (q - 1) * d                        d                         none

Types of points have words for each 32 values: in eight bits each the numbers of points, which are the next 4
or 8 values in the type's grid (shaders/matmul/grids.txt), and then the signs: the i-th of eight values, in
the j-th eight, has bit 16 (i % 2) + 4 (i // 2) + j of the last word. x is s of each group, then the upper
bits of each number, then flags that make 1/8 negative: one for all 32 values, or one for each point.

    name              bits     group  value                          scales                         biases
    iq3_xxs           3        32     +-point * d * (2 s + 1) / 4    d of 256                       none
    iq3_s             3        32     +-point * d * (2 s + 1) / 4    x of 4, 8 * 1 bits             d of 256
    iq2_xxs           2        32     +-point * d * (2 s + 1) / 8    d of 256                       none
    iq2_xs            2        16     +-point * d * (2 s + 1) / 8    x of 2 * 4 bits                d of 256
    iq2_s             2        16     +-point * d * (2 s + 1) / 8    x of 2 * 4, 4 * 2 bits         d of 256
    iq1_s             1        32     (point +- 1/8) * d * (2 s + 1) x of 3, 4 * 3, 1 bits          d of 256
    iq1_m             1        16     (point +- 1/8) * d * (2 s + 1) x of 2 * 3, 4 * 3, 4 * 1 bits  d of 256

In iq3_xxs, iq2_xxs and iq2_xs the eighth sign is the one that makes the number of minus signs even. The
four bits in its place are the s of the first two, and upper bits of numbers in iq2_xs. The x of 256 values of
iq1_m is in two parts: all but s for each 32 values, then their s.

s and n of a row are a stream of bits in uint8, the lowest first, s before n; "of 256": for so many values.
Every product is a float32, so that a value is rounded once, by the sum.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._choices import BITS, DEFAULTS, GROUP_SIZES, MODES, one_of
from ._checks import ACTIVATION_DTYPES, Check
from ._groups import prefixed

# The tensors of a quantised weight.
TENSORS = ("packed", "scales", "biases")


@dataclass(frozen=True)
class Integers:
    """The integers that are factors of a group's scale, and with `minima` of its bias, less `centre`."""

    bits: int
    minima: bool
    centre: int

    @property
    def halves(self) -> int:
        """Float16 numbers of a superblock: d, and m where there are minima."""
        return 2 if self.minima else 1


INTEGERS = {
    **{"q2_k": Integers(4, True, 0), "q3_k": Integers(6, False, 32), "q4_k": Integers(6, True, 0)},
    **{"q5_k": Integers(6, True, 0), "q6_k": Integers(8, False, 128), "iq4_xs": Integers(6, False, 32)},
}
GGUF = {
    **{"q4_0": (4, 32), "q4_1": (4, 32), "q5_0": (5, 32), "q5_1": (5, 32), "q8_0": (8, 32)},
    **{"q1_0": (1, 128), "q2_0": (2, 64)},
    **{"iq4_nl": (4, 32), "tq2_0": (2, 256)},
    **{"iq1_s": (1, 32), "iq1_m": (1, 16), "iq2_xxs": (2, 32), "iq2_xs": (2, 16), "iq2_s": (2, 16)},
    **{"iq3_xxs": (3, 32), "iq3_s": (3, 32)},
    **{name: (BITS[name][0], GROUP_SIZES[name][0]) for name in INTEGERS},
}
MLX_MODES = tuple(mode for mode in MODES if mode not in INTEGERS)


@dataclass(frozen=True)
class Grid:
    """A type of points: the bits of s, of a number beyond eight, and of the shifts of 32 values."""

    scale_bits: int
    number_bits: int
    shifts: int
    bits: int  # in `scales`, for 32 values


GRIDS = {
    **{"iq1_s": Grid(3, 3, 1, 16), "iq1_m": Grid(3, 3, 4, 22), "iq2_xxs": Grid(4, 0, 0, 0)},
    **{"iq2_xs": Grid(4, 1, 0, 8), "iq2_s": Grid(4, 2, 0, 16), "iq3_xxs": Grid(4, 0, 0, 0)},
    **{"iq3_s": Grid(4, 1, 0, 12)},
}
OFFSETS = {"q1_0": 0.5, "q2_0": 1, "tq2_0": 1, "q4_0": 8, "q5_0": 16, "q8_0": 128, "q3_k": 4, "q6_k": 32}
STEPS = {"q1_0": 2}  # from a code to the next, in scales; elsewhere 1
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LARGE_BLOCK = 256  # values that share d and m where there are integers
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INFINITE_E8M0 = 255  # the code of a scale of mxfp4 and mxfp8


_QUANTIZE = Check("quantize")


@dataclass(frozen=True, init=False)
class Format:
    """How weights are quantised: a row of the table above.

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
    def _named(cls, name: str, bits: int, group_size: int) -> "Format":
        """A format that nothing is quantised to, so that no mode of a user's names it."""
        format = object.__new__(cls)
        format._set(bits=bits, group_size=group_size, mode=name, name=name)
        return format

    def to_dict(self) -> dict[str, Any]:
        """The arguments by which a user asks for this format."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str, check: Check = _QUANTIZE, argument: str = "format") -> "Format":
        """Raises: ValueError, which names `check` and the argument, for a name that no format has."""
        if name not in FORMATS:
            check.fail(argument, "a name such as affine4_64 or mxfp4", repr(name))
        return FORMATS[name]

    @property
    def is_affine(self) -> bool:
        return self.mode == "affine"

    @property
    def has_biases(self) -> bool:
        return self.is_affine or self.stream_bits > 0 or self.name in ("q4_1", "q5_1")

    @property
    def stream_bits(self) -> int:
        """Bits that 32 values take in `scales` where these are a stream of bits, else 0."""
        if self.name in GRIDS:
            return GRIDS[self.name].bits
        integers = INTEGERS.get(self.name)
        return (
            0 if integers is None else 32 // self.group_size * integers.bits * (2 if integers.minima else 1)
        )

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.is_affine:
            return ACTIVATION_DTYPES
        return (torch.int16,) if self.name in GGUF and not self.stream_bits else (torch.uint8,)

    @property
    def bias_dtypes(self) -> tuple[torch.dtype, ...]:
        return ACTIVATION_DTYPES if self.is_affine else (torch.int16,)

    @property
    def multiple(self) -> int:
        """The number that the input dimension must be a multiple of."""
        return LARGE_BLOCK if self.name in INTEGERS or self.name in GRIDS else self.group_size

    def scales_of(self, columns: int) -> tuple[int, int]:
        """The elements of `scales` and of `biases` for a row."""
        blocks = columns // LARGE_BLOCK
        if not self.stream_bits:
            count = blocks if self.name in GRIDS else self.groups(columns)
            return count, count if self.has_biases else 0
        halves = INTEGERS[self.name].halves if self.name in INTEGERS else 1
        return blocks * self.stream_bits, blocks * halves

    def words(self, columns: int) -> int:
        return columns * self.bits // 32

    def groups(self, columns: int) -> int:
        return columns // self.group_size

    def columns(self, words: int) -> int:
        return words * 32 // self.bits

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
        biases: Tensor | None,
        shape: tuple[int, ...],
        meaning: str,
    ) -> None:
        """`shape`: of the dense weights; `meaning` names its dimensions, such as "E, N, H"."""
        check.none(f"for format {self.name}", not self.has_biases, **{f"{prefix}biases": biases})
        *rows, columns = shape
        counts = self.scales_of(columns)
        names = [f"[{meaning} / {self.group_size}]"] * 2
        if self.multiple == LARGE_BLOCK:
            names = [f"[{meaning} * {count} / {LARGE_BLOCK}]" for count in self.scales_of(LARGE_BLOCK)]
        check.tensor(f"{prefix}scales", scales, (*rows, counts[0]), names[0], self.scale_dtypes)
        if not self.has_biases:
            return
        if biases is None:
            check.fail(f"{prefix}biases", f"a tensor for format {self.name}", None)
        dtypes = (scales.dtype,) if self.is_affine else self.bias_dtypes
        check.tensor(f"{prefix}biases", biases, (*rows, counts[1]), names[1], dtypes)

    def all_finite(self, scales: Tensor) -> Tensor | None:
        """Whether no scale, or bias, is NaN or inf, a bool of no dimension; None where no code says that.

        It sums them, which no range of scales exceeds.
        """
        if scales.numel() == 0 or (scales.dtype == torch.uint8 and not self.mode.startswith("mx")):
            return None
        if scales.dtype == torch.uint8:
            return scales.amax() < INFINITE_E8M0
        halves = scales.view(torch.float16) if scales.dtype == torch.int16 else scales
        return halves.sum(dtype=torch.float32).isfinite()


FORMATS = {
    format.name: format
    for mode in MLX_MODES
    for format in (Format(b, g, mode) for b in BITS[mode] for g in GROUP_SIZES[mode])
}
for _name, (_bits, _group_size) in GGUF.items():
    FORMATS[_name] = Format._named(_name, _bits, _group_size)


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


def e4m3(codes: Tensor) -> Tensor:
    table = torch.tensor(_e4m3_values(), dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _pairs_by_table(octets: Tensor, values: tuple[float, ...]) -> Tensor:
    """Looks up two 4-bit codes at a time: 3 times as fast as shifting and converting, 19 times for e2m1."""
    value = torch.tensor(values, dtype=torch.float32, device=octets.device)
    pairs = torch.stack((value.repeat(16), value.repeat_interleave(16)), dim=-1).view(torch.int64).flatten()
    chosen = pairs.index_select(0, octets.flatten().int())
    return chosen.view(torch.float32).view(*octets.shape[:-1], 2 * octets.shape[-1])


def _repeated(mask: int, distance: int) -> int:
    return sum(mask << start for start in range(0, 64, distance))


def _spread(octets: Tensor, bits: int) -> Tensor:
    """uint8 [..., C * bits / 8] -> uint8 [..., C], one code a byte; eight move together, as an int64."""
    if bits == 8:
        return octets
    eights = octets.new_zeros(*octets.shape[:-1], octets.shape[-1] // bits, 8)
    eights[..., :bits] = octets.unflatten(-1, (-1, bits))
    codes = eights.view(torch.int64)
    for count in (4, 2, 1):  # how many codes move together
        lower = _repeated((1 << count * bits) - 1, 16 * count)
        upper = (codes << count * (8 - bits)).bitwise_and_(lower << 8 * count)
        codes.bitwise_and_(lower).bitwise_or_(upper)
    return eights.flatten(-2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> int32 [..., C * bits / 32]."""
    return pack_octets(codes, bits).view(torch.int32)


def pack_octets(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> uint8 [..., C * bits / 8]: the inverse of _spread."""
    if bits < 8:
        codes = codes.contiguous().view(torch.int64)
        for count in (1, 2, 4):
            lower = _repeated((1 << count * bits) - 1, 16 * count)
            upper = (codes >> count * (8 - bits)).bitwise_and_(lower << count * bits)
            codes = (codes & lower).bitwise_or_(upper)
        codes = codes.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)
    return codes.contiguous()


def _octets(packed: Tensor) -> Tensor:
    """[..., words] -> uint8 [..., 4 * words]."""
    if packed.numel() == 0:  # contiguous with any strides, of which no view as bytes takes all
        return packed.new_empty((*packed.shape[:-1], 4 * packed.shape[-1]), dtype=torch.uint8)
    return packed.view(torch.int32).contiguous().view(torch.uint8)


def unpack(packed: Tensor, format: Format) -> Tensor:
    """[..., words] uint32 or int32 -> [..., columns] float32: the numbers that the codes stand for."""
    octets = _octets(packed)
    if format.mode == "mxfp8":
        return e4m3(octets)
    if format.bits == 4:
        table = LEVELS if format.name in ("iq4_nl", "iq4_xs") else range(16)
        values = E2M1_VALUES if format.mode in ("mxfp4", "nvfp4") else tuple(map(float, table))
        return _pairs_by_table(octets, values)
    return _spread(octets, format.bits).float()


def decode(codes: Tensor, scales: Tensor, biases: Tensor | None, format: Format) -> Tensor:
    """Codes uint8 [..., group_size] with the scales and biases [...] of their groups -> float32."""
    if biases is not None:
        values = codes.float()
    elif format.mode == "mxfp8":
        values = e4m3(codes)
    else:
        table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
    return _scaled(values, scales, biases, format)


def _scaled(values: Tensor, scales: Tensor, biases: Tensor | None, format: Format) -> Tensor:
    """Applies scales and biases in place: the numbers [..., group_size] of codes become values."""
    if format.name in GGUF:
        scales, biases = _scales_of_ggml(scales, biases, format)
    if biases is not None:
        return values.mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1))
    if format.name not in GGUF:
        scales = e4m3(scales) if format.mode == "nvfp4" else e8m0(scales)
    return values.mul_(scales.unsqueeze(-1))


def _halves(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float16).float()


def _scales_of_ggml(scales: Tensor, biases: Tensor | None, format: Format) -> tuple[Tensor, Tensor | None]:
    """The scales and biases [..., groups] in float32."""
    integers, offset = INTEGERS.get(format.name), OFFSETS.get(format.name)
    if integers is None or biases is None:
        factors = _halves(scales) * STEPS.get(format.name, 1)
        biases = None if biases is None else _halves(biases)
    else:
        count, groups = integers.halves, LARGE_BLOCK // format.group_size
        numbers = _spread(scales.contiguous(), integers.bits).unflatten(-1, (-1, groups, count))
        products = (numbers.float() - integers.centre) * _halves(biases).unflatten(-1, (-1, 1, count))
        factors, *minima = products.flatten(-3, -2).unbind(-1)
        biases = -minima[0] if minima else None
    return factors, biases if offset is None else -offset * factors


@functools.cache
def grid_points(name: str) -> Tensor:
    """The points [n, values] of a type's grid, in float32."""
    for line in (Path(__file__).parents[1] / "shaders/matmul/grids.txt").read_text().splitlines():
        start, values, levels, digits = line.split(" ", 3)
        if start != "#" and name.startswith(start):
            level = torch.tensor([float(number) for number in levels.split(",")])
            octets = torch.tensor([int(digit, 16) for digit in digits], dtype=torch.uint8)
            points = _flags(octets)[..., :4].flatten().nonzero()
            return level[points // len(level) ** torch.arange(int(values)) % len(level)]
    raise KeyError(name)


def _flags(octets: Tensor) -> Tensor:
    """uint8 [...] -> uint8 [..., 8]: the lowest first."""
    return octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=octets.device) & 1


def _number(bits: Tensor) -> Tensor:
    """[..., n] -> int32 [...]."""
    places = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device)
    return (bits.int() << places).sum(-1, dtype=torch.int32)


def _grid_values(packed: Tensor, scales: Tensor, biases: Tensor | None, format: Format) -> Tensor:
    """dequantize_values for a type of points; the last dimensions but one are those of 32 values."""
    grid, table = GRIDS[format.name], grid_points(format.name).to(packed.device)
    groups, points = 32 // format.group_size, 32 // table.shape[1]
    octets = _octets(packed).unflatten(-1, (-1, 4 * format.bits))
    more = octets.new_empty(*octets.shape[:-1], 0)
    if biases is not None:
        stream = _flags(scales).flatten(-2).unflatten(-1, (-1, 8 * grid.bits))
        parts = stream.split((128, 48) if format.name == "iq1_m" else 8 * grid.bits, -1)
        more = torch.cat([part.unflatten(-1, (8, -1)) for part in reversed(parts)], -1).flatten(-3, -2)
    if format.bits > 1:
        signs = _flags(octets[..., -4:]).flatten(-2).unflatten(-1, (2, 4, 4)).transpose(-3, -1)
        signs = signs.flatten(-2)  # [..., eights, values]
        if grid.bits < 12:
            more = torch.cat((more, signs[..., 7]), -1)
            signs[..., 7] = signs[..., :7].sum(-1) & 1
    counts = [groups * grid.scale_bits, points * grid.number_bits, grid.shifts]
    scale, upper, shifts = more.split(counts, -1)
    numbers = octets[..., :points] + (_number(upper.unflatten(-1, (points, -1))) << 8)
    values = table[numbers.long()]
    if format.bits > 1:
        values *= 1.0 - 2.0 * signs.view(values.shape)
    else:
        values += (0.125 - 0.25 * shifts).unsqueeze(-1)
    factors = 2 * _number(scale.unflatten(-1, (groups, -1))) + 1
    halves = _halves(scales if biases is None else biases)
    factors = factors.unflatten(-2, (-1, 8)) * (halves / (1, 8, 4)[format.bits - 1])[..., None, None]
    return (values.reshape(*factors.shape, format.group_size) * factors.unsqueeze(-1)).flatten(-4)


def dequantize_values(packed: Tensor, scales: Tensor, biases: Tensor | None, format: Format) -> Tensor:
    """[..., words], [..., groups] -> [..., columns] float32."""
    if format.name in GRIDS:
        return _grid_values(packed, scales, biases, format)
    groups = unpack(packed, format).unflatten(-1, (-1, format.group_size))
    return _scaled(groups, scales, biases, format).flatten(-2)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantised matrix [R, C], or a stack of them [E, R, C]; it unpacks into its three tensors.

    Attributes:
        packed: [..., R, C * bits / 32], uint32 or the same bits as int32: the codes.
        scales: [..., R, C / group_size], or of GGUF's formats what the table at the top says.
        biases: like `scales`, or None where the format has none.
        format: how they are read.
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor | None
    format: Format

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, format: Format
    ) -> "QuantizedWeight":
        """Uninitialised, for a dense weight of a shape and a dtype."""
        *rows, columns = shape
        packed = torch.empty(*rows, format.words(columns), dtype=torch.uint32, device=device)
        counts = format.scales_of(columns)
        scale_dtype = dtype if format.is_affine else format.scale_dtypes[0]
        scales = torch.empty(*rows, counts[0], dtype=scale_dtype, device=device)
        if not format.has_biases:
            return cls(packed, scales, None, format)
        bias_dtype = dtype if format.is_affine else format.bias_dtypes[0]
        return cls(packed, scales, torch.empty(*rows, counts[1], dtype=bias_dtype, device=device), format)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.packed, self.scales, self.biases))

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Applies a function to each tensor that is not None."""
        biases = None if self.biases is None else function(self.biases)
        return QuantizedWeight(function(self.packed), function(self.scales), biases, self.format)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    def check(self, check: Check, prefix: str, shape: tuple[int, ...], meaning: str) -> None:
        """`shape` is the shape of the dense weight; `meaning` names its dimensions, such as "E, N, H"."""
        format = self.format
        *rows, columns = shape
        rows_name, _, columns_name = meaning.rpartition(", ")
        format.check_columns(check, f"{columns_name}, the input dimension of {prefix}packed,", columns)
        words = f"[{rows_name}, {columns_name} * {format.bits} / 32]"
        check.shape(f"{prefix}packed", self.packed, (*rows, format.words(columns)), words)
        format.check_scales(check, prefix, self.scales, self.biases, shape, meaning)

    def values(self, index: int | slice | Tensor) -> Tensor:
        """A matrix of the stack or some rows of the matrix, dequantised to float32."""
        biases = None if self.biases is None else self.biases[index]
        packed = self.packed.view(torch.int32)[index]  # uint32 cannot be indexed by a tensor
        return dequantize_values(packed, self.scales[index], biases, self.format)


@prefixed
class Weight(NamedTuple):
    """Arguments of an operator that are a quantised matrix, or a stack of them."""

    packed: Tensor
    scales: Tensor
    biases: Tensor | None

    def of(self, format: Format) -> QuantizedWeight:
        return QuantizedWeight(*self, format)
