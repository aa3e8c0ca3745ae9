"""The formats of quantised weights: their names, the shapes of their tensors, and what the codes mean.

    mode    bits              group        value                      scales
    affine  2, 3, 4, 5, 6, 8  32, 64, 128  q * scale + bias           float32, float16, bfloat16; biases alike
    mxfp4   4                 32           e2m1(q) * 2^(scale - 127)  uint8
    mxfp8   8                 32           e4m3(q) * 2^(scale - 127)  uint8
    nvfp4   4                 16           e2m1(q) * e4m3(scale)      uint8

All are laid out as mlx.core.quantize does: groups of consecutive values along the input dimension; the codes
of a row one after the other in 32-bit words, the first in the lowest bits, so that codes of 3, 5 and 6 bits
cross the ends of words. The numbers of mxfp4 and mxfp8 are those of OCP microscaling.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, Check

# The tensors of a quantised weight.
TENSORS = ("packed", "scales", "biases")
PACKED_DTYPES = (torch.uint32, torch.int32)
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
DEFAULT_BITS = {"affine": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
DEFAULT_GROUP_SIZE = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
MODES = tuple(BITS)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


_QUANTIZE = Check("quantize")


@dataclass(frozen=True, init=False)
class Format:
    """How weights are quantised: a row of the table above.

    A `bits` of None becomes 8 in mode "mxfp8" and 4 in the others. A group_size of None becomes 64 in mode
    "affine"; every other mode has one group size.
    """

    bits: int
    group_size: int
    mode: str
    name: str  # "affine4_64", "mxfp4": in operators, reports, config.json and Metal libraries

    def __init__(self, bits: int | None = None, group_size: int | None = None, mode: str = "affine"):
        _QUANTIZE.choice("mode", mode, MODES)
        for argument, value, allowed in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
            if value is not None and (type(value) is not int or value not in allowed[mode]):
                expected = " or ".join(map(str, allowed[mode])) + f" for mode {mode}"
                _QUANTIZE.fail(argument, expected, repr(value))
        set_field = functools.partial(object.__setattr__, self)
        set_field("bits", DEFAULT_BITS[mode] if bits is None else bits)
        set_field("group_size", DEFAULT_GROUP_SIZE[mode] if group_size is None else group_size)
        set_field("mode", mode)
        set_field("name", f"affine{self.bits}_{self.group_size}" if mode == "affine" else mode)

    def to_dict(self) -> dict[str, Any]:
        """What a user says for it."""
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
    def has_biases(self) -> bool:
        return self.mode == "affine"

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return ACTIVATION_DTYPES if self.has_biases else (torch.uint8,)

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
        if columns % self.group_size != 0:
            check.fail(argument, f"a multiple of {self.group_size}", columns)

    def check_scales(
        self,
        check: Check,
        prefix: str,
        scales: Tensor,
        biases: Tensor | None,
        shape: tuple[int, ...],
        meaning: str,
    ) -> None:
        if not self.has_biases and biases is not None:
            got = f"a tensor of shape {tuple(biases.shape)}"
            check.fail(f"{prefix}biases", f"None for format {self.name}", got)
        check.tensor(f"{prefix}scales", scales, shape, meaning, self.scale_dtypes)
        if not self.has_biases:
            return
        if biases is None:
            check.fail(f"{prefix}biases", f"a tensor for format {self.name}", None)
        check.tensor(f"{prefix}biases", biases, shape, meaning, (scales.dtype,))


FORMATS = {
    format.name: format
    for mode in MODES
    for format in (Format(b, g, mode) for b in BITS[mode] for g in GROUP_SIZES[mode])
}


@functools.cache
def _e4m3_values() -> tuple[float, ...]:
    """No code is infinite or NaN: 0x7f is 480, as in the Metal kernels. quantize never writes it."""
    magnitudes = [
        code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(128)
    ]
    return tuple(magnitudes + [-value for value in magnitudes])


def e8m0(scales: Tensor) -> Tensor:
    """2^(scale - 127) from its bits: 0 is the subnormal 2^-127, 255 is inf, as in MLX."""
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
    codes = eights.view(torch.int64).squeeze(-1)
    for count in (4, 2, 1):  # how many codes move together
        lower = _repeated((1 << count * bits) - 1, 16 * count)
        upper = (codes << count * (8 - bits)).bitwise_and_(lower << 8 * count)
        codes = (codes & lower).bitwise_or_(upper)
    return codes.view(torch.uint8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> int32 [..., C * bits / 32]: the inverse of _spread."""
    if bits < 8:
        codes = codes.contiguous().view(torch.int64)
        for count in (1, 2, 4):
            lower = _repeated((1 << count * bits) - 1, 16 * count)
            upper = (codes >> count * (8 - bits)).bitwise_and_(lower << count * bits)
            codes = (codes & lower).bitwise_or_(upper)
        codes = codes.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(-2)
    return codes.contiguous().view(torch.int32)


def unpack(packed: Tensor, format: Format) -> Tensor:
    """[..., words] uint32 or int32 -> [..., columns] float32: the numbers that the codes stand for."""
    octets = packed.view(torch.int32).contiguous().view(torch.uint8)
    if format.mode == "mxfp8":
        return e4m3(octets)
    if format.bits == 4:
        return _pairs_by_table(octets, tuple(map(float, range(16))) if format.has_biases else E2M1_VALUES)
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
    if biases is not None:
        return values.mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1))
    factors = e4m3(scales) if format.mode == "nvfp4" else e8m0(scales)
    return values.mul_(factors.unsqueeze(-1))


def dequantize_values(packed: Tensor, scales: Tensor, biases: Tensor | None, format: Format) -> Tensor:
    """[..., words], [..., groups] -> [..., columns] float32."""
    groups = unpack(packed, format).unflatten(-1, (-1, format.group_size))
    return _scaled(groups, scales, biases, format).flatten(-2)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantised matrix [R, C], or a stack of them [E, R, C]; it unpacks into its three tensors.

    Attributes:
        packed: [..., R, C * bits / 32], uint32 or the same bits as int32: the codes.
        scales: [..., R, C / group_size].
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
        groups = (*rows, format.groups(columns))
        packed = torch.empty(*rows, format.words(columns), dtype=torch.uint32, device=device)
        if not format.has_biases:
            return cls(packed, torch.empty(groups, dtype=torch.uint8, device=device), None, format)
        scales, biases = (torch.empty(groups, dtype=dtype, device=device) for _ in range(2))
        return cls(packed, scales, biases, format)

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
        check.dtype(f"{prefix}packed", self.packed, PACKED_DTYPES)
        words = f"[{rows_name}, {columns_name} * {format.bits} / 32]"
        check.shape(f"{prefix}packed", self.packed, (*rows, format.words(columns)), words)
        groups = f"[{rows_name}, {columns_name} / {format.group_size}]"
        format.check_scales(check, prefix, self.scales, self.biases, (*rows, format.groups(columns)), groups)

    def values(self, index: int | slice | Tensor) -> Tensor:
        """A matrix of the stack or some rows of the matrix, dequantised to float32."""
        biases = None if self.biases is None else self.biases[index]
        packed = self.packed.view(torch.int32)[index]  # uint32 cannot be indexed by a tensor
        return dequantize_values(packed, self.scales[index], biases, self.format)
