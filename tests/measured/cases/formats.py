"""Weights in MLX's formats: how they are made, and what they stand for in float64."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# How far a result may be from float64, in parts of the largest value: a few roundings to the dtype; sums of
# thousands of products in float32.
TOLERANCE = {"f32": 1e-5, "f16": 4 * 2.0**-11, "bf16": 3 * 2.0**-8}
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
        """`name` [experts, rows, inputs], or its `_packed`, `_scales`, `_biases`; elements of about 0.03."""
        if self.bits == 0:
            return {name: values.normal(experts, rows, inputs, dtype=dtype, scale=0.03)}
        words = (experts, rows, inputs * self.bits // 32)
        groups = (experts, rows, inputs // self.group)
        packed = values.integers(*words, dtype=torch.int32, low=-(2**31), high=2**31)
        if self.mode != "affine":
            # The exponents of e8m0 scales; those of nvfp4 are e4m3 numbers from 2^-6 to 2^-5.
            low, high = (8, 17) if self.mode == "nvfp4" else (118, 123)
            scales = values.integers(*groups, dtype=torch.uint8, low=low, high=high)
            return {f"{name}_packed": packed, f"{name}_scales": scales}
        unit = 0.1 / 2**self.bits
        scales = values.uniform(*groups, dtype=dtype, low=unit / 2, high=1.5 * unit)
        half = unit * 2 ** (self.bits - 1)
        biases = values.uniform(*groups, dtype=dtype, low=-1.5 * half, high=-half / 2)
        return {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_biases": biases}

    def matrix(self, tensors: dict[str, Tensor], name: str, expert: int) -> Tensor:
        """[rows, inputs] float64 of one expert."""
        if self.bits == 0:
            return tensors[name][expert].double()
        scales = tensors[f"{name}_scales"][expert]
        codes = self.codes(tensors[f"{name}_packed"][expert])
        if self.mode == "affine":
            biases = tensors[f"{name}_biases"][expert].double()
            return codes * self.spread(scales.double()) + self.spread(biases)
        if self.mode == "mxfp8":
            numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        else:
            numbers = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)[codes]
        if self.mode == "nvfp4":
            return numbers * self.spread(scales.view(torch.float8_e4m3fn).double())
        return numbers * self.spread(torch.exp2(scales.double() - 127))

    def codes(self, packed: Tensor) -> Tensor:
        """The codes of packed rows, which are streams of bits, the lowest first."""
        one = torch.arange(32, device=packed.device, dtype=torch.int32)
        bits = ((packed[..., None] >> one) & 1).reshape(packed.shape[0], -1, self.bits)
        return (bits << one[: self.bits]).sum(-1)

    def spread(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group, -1)


DENSE = Format(0, 0, "")
FORMATS = {
    **{f"int{bits}": Format(bits, 64, "affine") for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": Format(4, 32, "mxfp4"),
    "mxfp8": Format(8, 32, "mxfp8"),
    "nvfp4": Format(4, 16, "nvfp4"),
    "dense": DENSE,
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
