"""A dispatch of MLX's."""

from dataclasses import dataclass, field

import numpy as np
from simulator.apple.facts import M1, M3, M5, Gpu

from .formats import Format

TYPES = {"f16": "float16_t", "bf16": "bfloat16_t", "f32": "float"}


@dataclass(frozen=True)
class Matrices:
    """E matrices [rows, inputs] in a format, for activations of a dtype."""

    format: Format
    dtype: str
    rows: int
    inputs: int
    experts: int = 1


@dataclass(frozen=True)
class Launch:
    """A dispatch of a template's instance, out of `headers`.

    `arguments` has, by name in the kernel, the bytes that MLX gives by value, or the name of an array that it
    binds: "w" (with "scales" and "biases"), "x", "out", and for experts "x_rows" and "ids", or "offsets" (the
    first row of each expert). With `parts` above 1, out has that many float32 results, which another kernel
    adds up; that kernel is not measured.
    """

    headers: tuple[str, ...]
    template: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    arguments: dict[str, str | bytes]
    constants: dict[int, int] = field(default_factory=dict)
    parts: int = 1

    @property
    def kernel(self) -> str:
        return self.template.partition("<")[0]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def longs(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def generation(gpu: Gpu) -> int:
    """The number in Metal's name of the architecture: 13 for the M1, 15 for the M3; M4 is 16, M5 17."""
    named_m4 = gpu.name.startswith("M4")
    return {M1: 13, M1 + 1: 14, M3: 16 if named_m4 else 15, M5: 17}[gpu.family]


def size_letter(gpu: Gpu) -> str:
    """The letter at its end: "d" of an Ultra, "s" of Pro and Max, "g" of the others."""
    return "d" if "Ultra" in gpu.name else "s" if "Pro" in gpu.name or "Max" in gpu.name else "g"
