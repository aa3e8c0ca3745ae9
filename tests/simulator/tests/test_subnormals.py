"""Float32 subnormals are zero in kernels, as on Apple's GPUs: operands and results, with their sign.

What follows for a kernel's output: where the exact result is below 2^-126, mps gives a zero and the CPU need
not. Halves keep their subnormals, moves of bits keep everything, and nothing changes outside of kernels.
"""

import itertools

import numpy as np
import pytest
from simulator.errors import SimulatorError
from simulator.shaderlib import shader_library
from simulator.testing import HEAD, linux_only

pytestmark = linux_only

SMALLEST_NORMAL = 2.0**-126
MAGNITUDES = (
    0,
    2**-149,
    2**-130,
    2**-126 - 2**-149,
    2**-126,
    1.5 * 2**-126,
    2**-120,
    0.5,
    1,
    2**23,
    2.0**100,
)
VALUES = [sign * value for value in MAGNITUDES for sign in (1.0, -1.0)]
OPERATIONS = {
    "x + y": lambda x, y, z: x + y,
    "x - y": lambda x, y, z: x - y,
    "x * y": lambda x, y, z: x * y,
    "x / y": lambda x, y, z: x / y,
    "fma(x, y, z)": lambda x, y, z: x * y + z,
    "sqrt(fabs(x))": lambda x, y, z: np.sqrt(np.abs(x)),
    "float(x < y)": lambda x, y, z: x < y,
    "float(x == y)": lambda x, y, z: x == y,
    "float(bfloat(x))": lambda x, y, z: x,
}


def flushed(values) -> np.ndarray:
    """float32, with subnormals as zeros of their sign."""
    values = np.asarray(values).astype(np.float32)
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def bits(values: np.ndarray) -> list[int]:
    return values.view(f"u{values.itemsize}").tolist()


def launch(arguments: str, body: str, threads: int, **buffers) -> None:
    """`arguments` names the buffers in their order."""
    source = f"kernel void k({arguments}, uint i [[thread_position_in_threadgroup]]) {{ {body} }}"
    shader_library(HEAD + source).launch("k", dict(enumerate(buffers.values())), (1,), (threads,))


def test_operands_and_results_of_arithmetic():
    arguments = ", ".join(f"device const float* {name}_ [[buffer({i})]]" for i, name in enumerate("xyz"))
    arguments += ", device float* out [[buffer(3)]]"
    x, y = np.array(list(itertools.product(VALUES, VALUES)), np.float32).T
    body = "const float x = x_[i], y = y_[i], z = z_[i];"
    body += "".join(f"out[{k * len(x)} + i] = {operation};" for k, operation in enumerate(OPERATIONS))
    for z in (0.0, -(2.0**-126), 2.0**-127, 3 * 2.0**-128):
        z, out = np.full_like(x, z), np.full((len(OPERATIONS), len(x)), np.nan, np.float32)
        launch(arguments, body, len(x), x=x.copy(), y=y.copy(), z=z, out=out)
        for found, (operation, exact) in zip(out, OPERATIONS.items(), strict=True):
            with np.errstate(all="ignore"):
                expected = flushed(exact(*(flushed(v).astype(np.float64) for v in (x, y, z))))
            expected[np.isnan(expected)] = found[np.isnan(expected)] = np.nan
            assert bits(found) == bits(expected), operation


def test_functions_and_simdgroups_and_atomics():
    arguments = "device float* out [[buffer(0)]], device atomic_float* sum [[buffer(1)]]"
    body = "const float tiny = as_type<float>(uint(0x00500000)); "
    body += "if (i == 0) { out[0] = exp(out[32]); out[1] = pow(2.0f, out[33]); out[2] = tiny * 4096.0f; } "
    body += "atomic_fetch_add_explicit(sum, tiny, memory_order_relaxed); "
    body += "const float all = simd_sum(tiny); if (i == 0) out[3] = all;"
    out, total = np.array([np.nan] * 32 + [-90, -130], np.float32), np.zeros(1, np.float32)
    launch(arguments, body, 32, out=out, total=total)
    assert out[:4].tolist() == [0, 0, 0, 0] and total[0] == 0


def test_constants_that_the_compiler_folds():
    out = np.full(3, np.nan, np.float32)
    body = "float x = 0x1p-126f, y = 0x1p-130f; half z = 0x1p-14h; "
    body += "out[0] = x * 0.5f; out[1] = y * 0x1p100f; out[2] = z * half(0.25h);"
    launch("device float* out [[buffer(0)]]", body, 1, out=out)
    assert out.tolist() == [0, 0, 2.0**-16]


def test_halves_keep_their_subnormals():
    """Every half: converted to float, from float, times 1, halved, and the sum with the smallest."""
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    arguments = "device const half* x [[buffer(0)]], device float* out [[buffer(1)]], "
    arguments += "device half* results [[buffer(2)]]"
    body = "out[i] = float(x[i]); results[4 * i] = half(out[i]); results[4 * i + 1] = x[i] * half(0.5h); "
    body += (
        "results[4 * i + 2] = x[i] + as_type<half>(ushort(1)); results[4 * i + 3] = fma(x[i], x[i], x[i]);"
    )
    smallest = np.uint16(1).view(np.float16)
    for part in np.array_split(halves, 64):
        part = part.copy()
        out, results = np.zeros(len(part), np.float32), np.zeros((len(part), 4), np.float16)
        launch(arguments, body, len(part), x=part, out=out, results=results)
        exact = part.astype(np.float64)
        assert bits(out) == bits(part.astype(np.float32))
        with np.errstate(over="ignore"):
            expected = np.stack([part, part / np.float16(2), part + smallest, (exact**2 + exact)], 1)
            assert bits(results) == bits(expected.astype(np.float16))


def test_moves_keep_the_bits():
    words = np.array([1, 0x7FFFFF, 0x80000001, 0x807FFFFF, 0x00400000, 0x12345], np.uint32)
    moves = [
        "x[i]",
        "as_type<float>(as_type<uint>(x[i]))",
        "select(x[i], 1.0f, i > 99)",
        "-x[i]",
        "fabs(x[i])",
    ]
    moves += ["float2(x[i], 1.0f).x", "simd_shuffle_xor(x[i], 0)", "as_type<float>(as_type<half2>(x[i]))"]
    for move in moves:
        out = np.zeros(len(words), np.float32)
        arguments = "device const float* x [[buffer(0)]], device float* out [[buffer(1)]]"
        launch(arguments, f"out[i] = {move};", len(words), x=words.view(np.float32).copy(), out=out)
        flipped = {"-x[i]": words ^ 0x80000000, "fabs(x[i])": words & 0x7FFFFFFF}.get(move, words)
        assert bits(out) == flipped.tolist(), move


def test_the_host_keeps_its_subnormals():
    """Also after a kernel that ended in a finding."""
    x = np.array([2.0**-126], np.float32)
    launch("device float* x [[buffer(0)]]", "x[0] = x[0] * 0.5f;", 1, x=x)
    assert x[0] == 0
    with pytest.raises(SimulatorError, match="out of bounds"):
        launch("device float* x [[buffer(0)]]", "x[1] = 0.0f;", 1, x=x)
    half = np.array([2.0**-126], np.float32) * np.float32(0.5)
    assert half[0] == 2.0**-127 and half[0] * np.float32(2) == 2.0**-126
