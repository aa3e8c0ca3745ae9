"""Kernels that nobody here wrote: MLX's, compiled from its wheel's headers, against MLX's CPU results."""

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
from simulator.errors import SimulatorError
from simulator.shaderlib import shader_library
from support.msl_probes import SEEDS, linux_only

pytestmark = linux_only


@pytest.fixture(scope="module")
def mlx():
    return pytest.importorskip(
        "mlx.core", reason="MLX for Linux (pip install 'mlx[cpu]') gives the expected results"
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, mlx):
    """compiled(headers, instantiations, constants): a library of MLX kernels."""
    root = Path(importlib.util.find_spec("mlx").submodule_search_locations[0]) / "include"
    kernels = "mlx/backend/metal/kernels"
    assert (root / kernels / "softmax.h").exists(), (
        f"the wheel carries no Metal headers under {root / kernels}"
    )
    # This header adds bfloat overloads through builtins of Apple's compiler; the kernels here need none.
    stub = tmp_path_factory.mktemp("stub")
    (stub / kernels).mkdir(parents=True)
    (stub / kernels / "bf16_math.h").write_text("#pragma once\n")

    def build(headers, instantiations, constants=None, changed=None):
        """`changed` maps a header to another text for it."""
        for header, text in (changed or {}).items():
            folder = tmp_path_factory.mktemp("changed")
            (folder / kernels).mkdir(parents=True)
            (folder / kernels / header).write_text(text)
            return shader(headers, instantiations, constants, (folder, stub, root))
        return shader(headers, instantiations, constants, (stub, root))

    def shader(headers, instantiations, constants, include):
        lines = ["#include <metal_stdlib>", "#include <metal_simdgroup>"]
        lines += [f'#include "{kernels}/{header}"' for header in headers] + instantiations
        return shader_library("\n".join(lines) + "\n", constants, include)

    build.text = lambda header: (root / kernels / header).read_text()
    return build


def int32(*values):
    return np.array(values, np.int32)


def int64(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 1000), (2, 31), (1, 4096)])
def test_softmax(compiled, mlx, rows, columns, seed):
    library = compiled(
        ["utils.h", "softmax.h"], ['instantiate_kernel("softmax", softmax_single_row, float, float)']
    )
    x = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) * 5
    out = np.full_like(x, np.nan)
    threads = -(-columns // 4 // 32) * 32 or 32
    library.launch("softmax", {0: x, 1: out, 2: int32(columns)}, (rows,), (max(threads, 32),), seed=seed)
    np.testing.assert_allclose(out, np.array(mlx.softmax(mlx.array(x), axis=-1)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_logsumexp(compiled, mlx, seed):
    library = compiled(["utils.h", "logsumexp.h"], ['instantiate_kernel("logsumexp", logsumexp, half)'])
    x = np.random.default_rng(seed).normal(size=(4, 515)).astype(np.float16)
    out = np.full(4, np.nan, np.float16)
    library.launch("logsumexp", {0: x, 1: out, 2: int32(515)}, (4,), (160,), seed=seed)
    np.testing.assert_allclose(out, np.array(mlx.logsumexp(mlx.array(x), axis=-1)), rtol=1e-3)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("seed", [SEEDS[0], pytest.param(SEEDS[1], marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kernel", "header"), [("softmax_single_row", "softmax.h"), ("logsumexp", "logsumexp.h")]
)
def test_every_barrier_of_theirs_is_missed(compiled, kernel, header, seed):
    """Without any one of its barriers a kernel that is right in itself is found to race."""
    text = compiled.text(header)
    start = text.index(f"[[kernel]] void {kernel}(")
    end = text.find("[[kernel]]", start + 10) % len(text)
    barriers = text[start:end].count(BARRIER)
    assert barriers >= 3
    x = np.random.default_rng(seed).normal(size=(2, 512)).astype(np.float32)
    for nth in range(barriers):
        at = start
        for _ in range(nth + 1):
            at = text.index(BARRIER, at + 1)
        without = text[:at] + text[at + len(BARRIER) :]
        instance = f'instantiate_kernel("k", {kernel}, float)'
        library = compiled(["utils.h", header], [instance], changed={header: without})
        with pytest.raises(SimulatorError, match=r"race within a threadgroup|reads uninitialised"):
            library.launch("k", {0: x, 1: np.empty_like(x), 2: int32(512)}, (2,), (128,), seed=seed)


def quantised(mlx, shape, group_size, bits, seed, dtype):
    weight = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return mlx.quantize(mlx.array(weight), group_size=group_size, bits=bits)


QUANTISED_HEADERS = ["utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32)])
def test_affine_qmv_fast(compiled, mlx, bits, group_size, seed):
    library = compiled(
        QUANTISED_HEADERS, [f'instantiate_kernel("qmv", affine_qmv_fast, float, {group_size}, {bits}, false)']
    )
    n, k = 64, 1024
    w, scales, biases = quantised(mlx, (n, k), group_size, bits, seed, np.float32)
    x = np.random.default_rng(seed + 10).normal(size=(2, k)).astype(np.float32)
    out = np.full((2, n), np.nan, np.float32)
    none, no_strides = int32(0), int64(0)
    buffers = {
        0: np.array(w),
        1: np.array(scales),
        2: np.array(biases),
        3: x,
        4: out,
        5: int32(k),
        6: int32(n),
    }
    buffers |= {
        7: int32(0),
        8: none,
        9: no_strides,
        10: int32(0),
        11: none,
        12: no_strides,
        13: no_strides,
        14: no_strides,
    }
    library.launch("qmv", buffers, (2, n // 8, 1), (32, 2, 1), seed=seed)
    expected = mlx.quantized_matmul(mlx.array(x), w, scales, biases, True, group_size=group_size, bits=bits)
    np.testing.assert_allclose(out, np.array(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_affine_gather_qmv_fast(compiled, mlx, seed):
    library = compiled(
        QUANTISED_HEADERS, ['instantiate_kernel("gather", affine_gather_qmv_fast, half, 64, 4)']
    )
    experts, n, k = 5, 32, 512
    w, scales, biases = quantised(mlx, (experts, n, k), 64, 4, seed, np.float16)
    generator = np.random.default_rng(seed + 10)
    x = generator.normal(size=(3, 1, k)).astype(np.float16)
    lhs, rhs = np.array([0, 1, 2, 2], np.uint32), np.array([4, 0, 3, 1], np.uint32)
    out = np.full((4, 1, n), np.nan, np.float16)
    w_strides = int64(n * k // 8), int64(n * k // 64), int64(n * k // 64)
    buffers = {0: np.array(w), 1: np.array(scales), 2: np.array(biases), 3: x, 4: lhs, 5: rhs, 6: out}
    buffers |= {
        7: int32(k),
        8: int32(n),
        9: int32(1),
        10: int32(3, 1, k),
        11: int64(k, k, 1),
        12: int32(1),
        13: int32(experts),
    }
    buffers |= {
        14: w_strides[0],
        15: w_strides[1],
        16: w_strides[2],
        17: int32(1),
        18: int32(4),
        19: int64(1),
        20: int64(1),
    }
    library.launch("gather", buffers, (1, n // 8, 4), (32, 2, 1), seed=seed)
    # In float32: on the CPU MLX accumulates halves in half, which its Metal kernel does not.
    x, scales, biases = (mlx.array(v).astype(mlx.float32) for v in (x, scales, biases))
    expected = mlx.gather_qmm(
        x, w, scales, biases, mlx.array(lhs), mlx.array(rhs), transpose=True, group_size=64, bits=4
    )
    np.testing.assert_allclose(out, np.array(expected), rtol=2e-3, atol=1e-2)


def gemm_params(m, n, k, block, transpose_b):
    fields = [m, n, k, k, k if transpose_b else n, n, -(-n // block[1]), -(-m // block[0])]
    return struct.pack("8i3q3i4x", *fields, 0, 0, 0, 0, k // block[2], 0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 48), (37, 50, 40)])
def test_steel_gemm(compiled, mlx, m, n, k, transpose_b, seed):
    block = (32, 32, 16)
    constants = {10: False, 100: False, 110: False, 200: m % 32 == 0, 201: n % 32 == 0, 202: k % 16 == 0}
    sizes = ", ".join(map(str, block))
    library = compiled(
        ["utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h"],
        [f'instantiate_kernel("gemm", gemm, float, {sizes}, 2, 2, false, {str(transpose_b).lower()})'],
        constants,
    )
    generator = np.random.default_rng(seed)
    a = generator.normal(size=(m, k)).astype(np.float32)
    b = generator.normal(size=(n, k) if transpose_b else (k, n)).astype(np.float32)
    out = np.full((m, n), np.nan, np.float32)
    counters = library.launch(
        "gemm",
        {0: a, 1: b, 3: out, 4: gemm_params(m, n, k, block, transpose_b)},
        (-(-n // 32), -(-m // 32), 1),
        (32, 2, 2),
        seed=seed,
    )
    expected = mlx.matmul(mlx.array(a), mlx.array(b.T if transpose_b else b))
    np.testing.assert_allclose(out, np.array(expected), rtol=1e-4, atol=1e-4)
    assert counters["buffers"][3]["distinct_bytes_written"] == out.nbytes
