"""Weights in the formats of the experts: how they are made, and what they stand for in float64."""

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
    """bits 0: the dtype of the activations."""

    bits: int
    group_size: int
    mode: str

    def options(self) -> tuple[int, int, str]:
        return self.bits, self.group_size, self.mode

    def make(self, values, name: str, experts: int, rows: int, inputs: int, dtype) -> dict[str, Tensor]:
        """`name` [experts, rows, inputs], or its `_packed`, `_scales`, `_biases`; elements of about 0.03."""
        if self.bits == 0:
            return {name: values.normal(experts, rows, inputs, dtype=dtype, scale=0.03)}
        words = (experts, rows, inputs * self.bits // 32)
        groups = (experts, rows, inputs // self.group_size)
        packed = values.integers(*words, dtype=torch.int32, low=-(2**31), high=2**31)
        if self.mode == "mxfp4":
            scales = values.integers(*groups, dtype=torch.uint8, low=118, high=123)
            return {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_biases": None}
        unit = 0.1 / 2**self.bits
        scales = values.uniform(*groups, dtype=dtype, low=unit / 2, high=1.5 * unit)
        half = unit * 2 ** (self.bits - 1)
        biases = values.uniform(*groups, dtype=dtype, low=-1.5 * half, high=-half / 2)
        return {f"{name}_packed": packed, f"{name}_scales": scales, f"{name}_biases": biases}

    def matrix(self, tensors: dict[str, Tensor], name: str, expert: int) -> Tensor:
        """[rows, inputs] float64 of one expert."""
        if self.bits == 0:
            return tensors[name][expert].double()
        packed, scales = tensors[f"{name}_packed"][expert], tensors[f"{name}_scales"][expert]
        shifts = torch.arange(0, 32, self.bits, device=packed.device, dtype=torch.int32)
        codes = ((packed[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)
        if self.mode == "mxfp4":
            numbers = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)[codes]
            return numbers * torch.exp2(scales.double() - 127).repeat_interleave(self.group_size, -1)
        biases = tensors[f"{name}_biases"][expert].double()
        scales = scales.double().repeat_interleave(self.group_size, -1)
        return codes * scales + biases.repeat_interleave(self.group_size, -1)


FORMATS = {
    "int4": Format(4, 64, "affine"),
    "int8": Format(8, 64, "affine"),
    "mxfp4": Format(4, 32, "mxfp4"),
    "dense": Format(0, 0, ""),
}


def weight_bytes(tensors: dict[str, Tensor], name: str) -> int:
    """Bytes of a matrix `name` of one expert."""
    parts = [t for key, t in tensors.items() if key.startswith(name) and t is not None]
    return sum(t.nbytes // t.shape[0] for t in parts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of the largest expected value."""
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    return error.item() if math.isfinite(error.item()) else math.inf


def too_far(actual: Tensor, expected: Tensor, dtype: str) -> str:
    """Empty, or how far a result is from float64."""
    error = relative_error(actual, expected)
    return "" if error <= TOLERANCE[dtype] else f"error {error:.1e}"
