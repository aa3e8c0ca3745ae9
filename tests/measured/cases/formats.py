"""Weights in formats of MLX, other quantisers and GGUF: how they are made, and their float64 values."""

import math
from dataclasses import dataclass

import torch
from support.oracles_experts import GGML, point_values
from torch import Tensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# How far a result may be from float64, in parts of the largest value: a few roundings to the dtype; sums of
# thousands of products in float32.
TOLERANCE = {"f32": 1e-5, "f16": 4 * 2.0**-11, "bf16": 3 * 2.0**-8}
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of ggml's iq4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Format:
    """Codes of `bits` in groups of `group` columns; mode affine, mxfp4, mxfp8 or nvfp4. bits 0: dense."""

    bits: int
    group: int
    mode: str

    @property
    def name(self) -> str:
        """What the operators call it."""
        return f"affine{self.bits}_{self.group}" if self.mode == "affine" else self.mode

    def make(self, values, name: str, experts: int, rows: int, inputs: int, dtype) -> dict[str, Tensor]:
        """`name` [experts, rows, inputs], or its `_packed`, `_scales`, `_zeros`; elements of about 0.03."""
        if self.bits == 0:
            return {name: values.normal(experts, rows, inputs, dtype=dtype, scale=0.03)}
        words = (experts, rows, inputs * self.bits // 32)
        groups = (experts, rows, inputs // self.group)
        packed = values.integers(*words, dtype=torch.int32, low=-(2**31), high=2**31)
        if self.mode != "affine":
            # The exponents of e8m0 scales; those of nvfp4 are e4m3 numbers from 2^-6 to 2^-5.
            low, high = (8, 17) if self.mode == "nvfp4" else (118, 123)
            if self.mode == "mxfp8":  # NaN is no weight
                codes = packed.view(torch.uint8)
                codes ^= ((codes & 127) == 127).to(torch.uint8)
            scales = values.integers(*groups, dtype=torch.uint8, low=low, high=high)
            return {f"{name}_packed": packed, f"{name}_scales": scales}
        unit = 0.1 / 2**self.bits
        scales = values.uniform(*groups, dtype=dtype, low=unit / 2, high=1.5 * unit)
        half = unit * 2 ** (self.bits - 1)
        biases = values.uniform(*groups, dtype=dtype, low=-1.5 * half, high=-half / 2)
        return {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_zeros": biases}

    def matrix(self, tensors: dict[str, Tensor], name: str, expert: int) -> Tensor:
        """[rows, inputs] float64 of one expert."""
        if self.bits == 0:
            return tensors[name][expert].double()
        scales = tensors[f"{name}_scales"][expert]
        codes = codes_of(tensors[f"{name}_packed"][expert], self.bits)
        if self.mode == "affine":
            biases = tensors[f"{name}_zeros"][expert].double()
            return codes * self.spread(scales.double()) + self.spread(biases)
        if self.mode == "mxfp8":
            numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        else:
            numbers = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)[codes]
        if self.mode == "nvfp4":
            return numbers * self.spread(scales.view(torch.float8_e4m3fn).double())
        return numbers * self.spread(torch.exp2(scales.double() - 127))

    def spread(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group, -1)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """The codes of packed rows, which are streams of bits, the lowest first."""
    one = torch.arange(32, device=packed.device, dtype=torch.int32)
    stream = (packed.int()[..., None] >> one[: 8 * packed.itemsize]) & 1
    return (stream.reshape(packed.shape[0], -1, bits) << one[:bits]).sum(-1)


@dataclass(frozen=True)
class Blocks(Format):
    """One of GGUF's with scales of its own for each group, taken apart."""

    @property
    def levels(self) -> bool:
        return self.mode.startswith("iq4")

    @property
    def integers(self) -> int:
        """Bits of the integers that are factors of scales, and of minima; 0 where there are none."""
        kind = GGML[self.mode].integers
        return kind.bits if kind else 0

    @property
    def minima(self) -> bool:
        return GGML[self.mode].minima

    def make(self, values, name, experts, rows, inputs, dtype):
        words = (experts, rows, inputs * self.bits // 32)
        packed = values.integers(*words, dtype=torch.int32, low=-(2**31), high=2**31)
        count, largest = 1 + self.minima, 0.1 / (128 if self.levels else 2 ** (self.bits - 1))

        def halves(number: int, largest: float) -> Tensor:
            """As int16 tensors hold them."""
            shape = (experts, rows, number)
            return values.uniform(*shape, dtype=torch.float16, low=-largest, high=largest).view(torch.int16)

        if self.integers:
            octets = (experts, rows, inputs // self.group * count * self.integers // 8)
            scales = values.integers(*octets, dtype=torch.uint8, low=0, high=256)
            biases = halves(inputs // 256 * count, largest / 2 ** (self.integers - 1))
        else:
            scales = halves(inputs // self.group, largest)
            biases = halves(inputs // self.group, largest) if self.minima else None
        found = {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_zeros": biases}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def matrix(self, tensors, name, expert):
        codes = codes_of(tensors[f"{name}_packed"][expert], self.bits)
        scales = tensors[f"{name}_scales"][expert]
        biases = tensors[f"{name}_zeros"][expert] if f"{name}_zeros" in tensors else None
        if self.integers:  # one for each group, and with minima another
            pairs = (
                codes_of(scales, self.integers).unflatten(-1, (-1, 1 + self.minima))
                - GGML[self.mode].integers.centre
            )
            factors = biases.view(torch.float16).double().unflatten(-1, (-1, 1 + self.minima))
            products = pairs * factors.repeat_interleave(256 // self.group, -2)
            scale, bias = products[..., 0], -products[..., -1]
        else:
            scale = scales.view(torch.float16).double()
            bias = biases.view(torch.float16).double() if self.minima else None
        levels = torch.tensor(LEVELS, dtype=torch.float64, device=codes.device)
        numbers = levels[codes] if self.levels else codes - GGML[self.mode].centre
        if self.bits == 1:
            numbers *= 2  # codes are -1 and 1
        result = numbers * self.spread(scale)
        return result + self.spread(bias) if self.minima else result


@dataclass(frozen=True)
class Codebook(Format):
    """One of GGUF's codebook formats."""

    def make(self, values, name, experts, rows, inputs, dtype):
        words = (experts, rows, inputs * self.bits // 32)
        packed = values.integers(*words, dtype=torch.int32, low=-(2**31), high=2**31)
        largest = 0.1 / (8, 80, 250)[self.bits - 1]
        halves = values.uniform(
            experts, rows, inputs // 256, dtype=torch.float16, low=-largest, high=largest
        ).view(torch.int16)
        stream_bits = GGML[self.mode].codebook.stream
        if not stream_bits:
            return {f"{name}_packed": packed, f"{name}_scales": halves}
        octets = (experts, rows, inputs // 256 * stream_bits)
        scales = values.integers(*octets, dtype=torch.uint8, low=0, high=256)
        return {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_zeros": halves}

    def matrix(self, tensors, name, expert):
        parts = [tensors.get(f"{name}_{part}") for part in ("packed", "scales", "zeros")]
        own = [None if part is None else part[expert] for part in parts]
        return torch.from_numpy(point_values(*own, self.mode, GGML[self.mode].codebook)).to(parts[0].device)


@dataclass(frozen=True)
class Floats(Format):
    """Of other quantisers: e4m3 codes with float32 scales, and nvfp4 times a number of the matrix."""

    @property
    def without_float32(self) -> Format:
        return Format(4, 16, "nvfp4") if self.bits == 4 else Format(8, self.group, "mxfp8")

    def make(self, values, name, experts, rows, inputs, dtype):
        made = self.without_float32.make(values, name, experts, rows, inputs, dtype)
        if self.bits == 4:
            numbers = values.uniform(experts, 1, 1, low=0.5, high=2.0).expand(experts, rows, 1)
            return made | {f"{name}_zeros": numbers.contiguous().view(torch.int32)}
        numbers = values.uniform(experts, rows, inputs // self.group, low=1e-4, high=4e-4)
        return made | {f"{name}_scales": numbers.view(torch.int32)}

    def matrix(self, tensors, name, expert):
        if self.bits == 4:
            numbers = tensors[f"{name}_zeros"][expert].view(torch.float32)
            return self.without_float32.matrix(tensors, name, expert) * numbers.double()
        codes = tensors[f"{name}_packed"][expert].contiguous().view(torch.float8_e4m3fn).double()
        return codes * self.spread(tensors[f"{name}_scales"][expert].view(torch.float32).double())


DENSE = Format(0, 0, "")
FORMATS = {
    **{f"int{bits}": Format(bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": Format(4, 32, "mxfp4"),
    "mxfp8": Format(8, 32, "mxfp8"),
    "nvfp4": Format(4, 16, "nvfp4"),
    "nvfp4_global": Floats(4, 16, "nvfp4_global"),
    **{f"fp8_{group}": Floats(8, group, f"fp8_{group}") for group in (32, 128)},
    "dense": DENSE,
}
GGUF = {
    name: (Codebook if kind.codebook else Blocks)(kind.bits, kind.group_size, name)
    for name, kind in GGML.items()
}


def weight_bytes(tensors: dict[str, Tensor], name: str) -> int:
    """Bytes of a matrix `name` of one expert."""
    parts = [t for key, t in tensors.items() if key.startswith(name)]
    return sum(t.nbytes // t.shape[0] for t in parts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest expected value."""
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    return error.item() if math.isfinite(error.item()) else math.inf


def too_far(actual: Tensor, expected: Tensor, dtype: str) -> str:
    """Empty, or how far a result is from float64."""
    error = relative_error(actual, expected)
    return "" if error <= TOLERANCE[dtype] else f"error {error:.1e}"
