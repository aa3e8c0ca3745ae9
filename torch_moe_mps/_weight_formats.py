"""Table of the formats of quantised weights: the meaning of their codes, and their shader templates.

This is the only list of formats. `ops/_formats.py` decodes by it, the options of commands are checked by it
before torch is imported, and the host code gets its templates from it (`_extension.activate`).

    format        bits       group        value                          scales
    affine        1 to 6, 8  32, 64, 128  q * scale + zero               float32, float16, bfloat16
    mxfp4         4          32           e2m1(q) * 2^(scale - 127)      uint8
    mxfp8         8          32           e4m3(q) * 2^(scale - 127)      uint8
    nvfp4         4          16           e2m1(q) * e4m3(scale)          uint8
    nvfp4_global  4          16           e2m1(q) * e4m3(scale) * zero   uint8
    fp8           8          32, 128      e4m3(q) * scale                int32, the bits of float32

The codes are laid out as mlx.core.quantize does: groups of consecutive values along the input dimension; the
codes of a row packed into 32-bit integers, the first in the lowest bits, so that codes of 3, 5 and 6 bits
cross their boundaries. mxfp4 and mxfp8 are OCP microscaling formats. Zeros of affine formats are the values
of code 0, which MLX calls biases, and are like their scales. The zeros [..., R, 1] of nvfp4_global are the
global scale of the matrix, once for each row, so that matrices can be joined: int32, the bits of float32.
Casting a model to another dtype leaves integers as they are. MLX has neither nvfp4_global nor fp8:
checkpoints of other quantisers become them.

All other rows are formats of GGUF. They have ggml's values in the same layout: packed codes q, and the
blocks' other fields in two tensors. d and m are float16, whose bits int16 tensors hold.
`offset`, `step` and the NamedTuples below are of the row:

    scales                 value                                                     scales, zeros
    Halves                 (step * q - offset) * d                                   d, none
    Halves(minima)         q * d + m                                                 d, m
    Integers               (q - offset) * (d * (s - centre))                         s, d of 256
    Integers(minima)       q * (d * s) - m * n                                       s and n, d and m of 256
    Codebook, 1 bit        (point +- 1/8) * d * (2 s + 1)                            x, d of 256
    Codebook, 2, 3 bits    +-point * d * (2 s + 1) / 8 with 2 bits, / 4 with 3       x, d of 256

"of 256": for so many values. With `levels`, level(q) stands for q. s and n of a row are unsigned integers in
a stream of bits in uint8, the lowest first, s before n. Every product is a float32, so that a value is
rounded once, by the sum.

Codebook formats have 32-bit integers for each 32 values: in eight bits each the numbers of points, which are
the next 4 or 8 values in the format's grid (shaders/matmul/grids.txt), and then the signs: the i-th of eight
values, in the j-th eight, has bit 16 (i % 2) + 4 (i // 2) + j of the last one. x is s of each group, then the
upper bits of each number, then flags that make 1/8 negative: one for all 32 values, or one for each point.
With 2 and 3 bits and less than 12 bits in `scales` for 32 values, the eighth sign makes the number of minus
signs even, and the four bits in its place are the last of x. If that is all of x, d is in `scales`. The x of
256 values of iq1_m is in two parts: all but s for each 32 values, then their s.
"""

from dataclasses import dataclass
from typing import NamedTuple

LARGE_BLOCK = 256  # values that share d and m where there are integers or a codebook


class LikeActivations(NamedTuple):
    """A scale and a bias for each group, in a dtype of activations."""


class Floats(NamedTuple):
    """A scale for each group, e8m0, e4m3 or fp32, of codes that are floats, e2m1 or e4m3.

    With `has_global`, each row has a float32 factor, too.
    """

    number: str
    scale: str
    has_global: bool = False


class Halves(NamedTuple):
    """A float16 for each group, and with `minima` a second one, which is added."""

    minima: bool = False


class Integers(NamedTuple):
    """Integers of `bits`, less `centre`: factors of a group's scale, and with `minima` of its minimum."""

    bits: int
    minima: bool = False
    centre: int = 0

    @property
    def halves(self) -> int:
        """Float16 numbers of a superblock: d, and m where there are minima."""
        return 2 if self.minima else 1


class Codebook(NamedTuple):
    """The bits of s, of a number beyond eight, of the flags of 32 values, and of their x in `scales`."""

    scale_bits: int
    number_bits: int
    flags: int
    stream_bits: int


@dataclass(frozen=True)
class FormatRow:
    """Storage of a format's weights.

    Attributes:
        offset, step: of the codes.
        levels: codes are numbers of ggml's 16 levels.
        groupwise_bits: of the affine format that takes the place of this one where rows are no multiple of
            256: with its scales about as many as the types that llama.cpp takes, 4.5 (Q4_0), 5.5 (Q5_0),
            6 (Q5_1) and 8.5 (Q8_0). Formats of GGUF have it that `quantize` writes.
    """

    bits: int
    group_size: int
    scales: LikeActivations | Floats | Halves | Integers | Codebook
    offset: float = 0
    step: int = 1
    levels: bool = False
    groupwise_bits: int | None = None

    @property
    def is_of_mlx(self) -> bool:
        if isinstance(self.scales, Floats):
            return self.scales.scale != "fp32" and not self.scales.has_global
        return isinstance(self.scales, LikeActivations)

    @property
    def template(self) -> tuple[str, str]:
        """The type in Metal that reads the weights, and the file of shaders/matmul/formats/ that has it."""
        scales, group = self.scales, self.group_size
        if isinstance(scales, Floats):
            number, scale = scales.number.upper(), scales.scale.upper()
            type = f"FloatCodes<MOE_DTYPE, {number}, Scale{scale}, {group}>"
            return f"ScaledRows<{type}>" if scales.has_global else type, "floats"
        if isinstance(scales, Codebook):
            bits = (self.bits, group, scales.scale_bits, scales.number_bits, scales.stream_bits)
            return f"GridCodes<MOE_DTYPE, {', '.join(map(str, bits))}>", "codebook"
        offset = 1 if self.levels else int(self.offset)  # levels have none: 1 says that they have no bias
        if isinstance(scales, Integers):
            numbers = (group, scales.bits, str(scales.minima).lower(), scales.centre, offset)
            type, file = f"SmallScales<{', '.join(map(str, numbers))}>", "small_scales"
        elif group == LARGE_BLOCK:
            type, file = f"SmallScales<32, 0, false, 0, {offset}>", "small_scales"
        elif isinstance(scales, LikeActivations):
            type, file = f"TypedScales<MOE_DTYPE, {group}>", "typed_scales"
        elif self.step == 2:
            type, file = f"SignScales<{group}>", "typed_scales"
        else:
            type, file = f"TypedScales<half, {group}{f', {offset}' if offset else ''}>", "typed_scales"
        if self.levels:
            return f"LevelCodes<MOE_DTYPE, {type}>", "levels"
        return f"Integers<MOE_DTYPE, {self.bits}, {type}>", file


# "Add a format" in CONTRIBUTING.md says what a new one needs beside its row.
ROWS = {
    **{
        f"affine{b}_{g}": FormatRow(b, g, LikeActivations())
        for b in (1, 2, 3, 4, 5, 6, 8)
        for g in (32, 64, 128)
    },
    "mxfp4": FormatRow(4, 32, Floats("e2m1", "e8m0")),
    "mxfp8": FormatRow(8, 32, Floats("e4m3", "e8m0")),
    "nvfp4": FormatRow(4, 16, Floats("e2m1", "e4m3")),
    "nvfp4_global": FormatRow(4, 16, Floats("e2m1", "e4m3", has_global=True)),
    **{f"fp8_{g}": FormatRow(8, g, Floats("e4m3", "fp32")) for g in (32, 128)},
    "q1_0": FormatRow(1, 128, Halves(), offset=1, step=2),
    "q2_0": FormatRow(2, 64, Halves(), offset=1),
    "q4_0": FormatRow(4, 32, Halves(), offset=8),
    "q4_1": FormatRow(4, 32, Halves(minima=True)),
    "q5_0": FormatRow(5, 32, Halves(), offset=16),
    "q5_1": FormatRow(5, 32, Halves(minima=True)),
    "q8_0": FormatRow(8, 32, Halves(), offset=128),
    "q2_k": FormatRow(2, 16, Integers(4, minima=True), groupwise_bits=4),
    "q3_k": FormatRow(3, 16, Integers(6, centre=32), offset=4, groupwise_bits=4),
    "q4_k": FormatRow(4, 32, Integers(6, minima=True), groupwise_bits=5),
    "q5_k": FormatRow(5, 32, Integers(6, minima=True), groupwise_bits=6),
    "q6_k": FormatRow(6, 16, Integers(8, centre=128), offset=32, groupwise_bits=8),
    "iq4_nl": FormatRow(4, 32, Halves(), levels=True),
    "iq4_xs": FormatRow(4, 32, Integers(6, centre=32), levels=True, groupwise_bits=4),
    "tq2_0": FormatRow(2, 256, Halves(), offset=1),
    "iq1_s": FormatRow(1, 32, Codebook(3, 3, 1, 16)),
    "iq1_m": FormatRow(1, 16, Codebook(3, 3, 4, 22)),
    "iq2_xxs": FormatRow(2, 32, Codebook(4, 0, 0, 0)),
    "iq2_xs": FormatRow(2, 16, Codebook(4, 1, 0, 8)),
    "iq2_s": FormatRow(2, 16, Codebook(4, 2, 0, 16)),
    "iq3_xxs": FormatRow(3, 32, Codebook(4, 0, 0, 0)),
    "iq3_s": FormatRow(3, 32, Codebook(4, 1, 0, 12)),
}

_AFFINE = [row for row in ROWS.values() if isinstance(row.scales, LikeActivations)]
_OTHERS = {
    name: row
    for name, row in ROWS.items()
    if (isinstance(row.scales, Floats) and row.is_of_mlx) or row.groupwise_bits is not None
}
# {mode: bits}, {mode: columns that share a scale} that weights can be quantised to.
BITS = {"affine": tuple(dict.fromkeys(row.bits for row in _AFFINE))} | {
    name: (row.bits,) for name, row in _OTHERS.items()
}
GROUP_SIZES = {"affine": tuple(dict.fromkeys(row.group_size for row in _AFFINE))} | {
    name: (row.group_size,) for name, row in _OTHERS.items()
}
MODES = tuple(BITS)
DEFAULTS = {mode: (BITS[mode][0], GROUP_SIZES[mode][0]) for mode in MODES} | {"affine": (4, 64)}
