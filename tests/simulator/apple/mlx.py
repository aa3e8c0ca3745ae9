"""MLX's kernels as its own host code would dispatch them, from the headers in the installed `mlx` wheel.

What MLX chooses is written down here, from mlx/backend/metal/quantized.cpp of 0.32.2 (its host code is in no
wheel); what the kernels are comes from the wheel. Buffers are bound by the names of the kernels' arguments.
The tensor units of the M5 ("nax" kernels) are left out.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import build, shaderlib
from ..errors import SimulatorError
from .facts import M1, M3, M5, Gpu
from .model import Measurement, Work
from .recorder import Recorder

_KERNELS = "mlx/backend/metal/kernels"
_PRELUDE = """\
#include <metal_stdlib>
using namespace metal;
template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T x) { return x; }"""
TYPES = {"f16": "float16_t", "bf16": "bfloat16_t", "f32": "float"}
SORTED_FROM = 64  # pairs: mlx_lm's SwitchGLU orders them by expert from here on


@dataclass(frozen=True)
class Format:
    """A format of MLX: codes of `bits`, groups of `group` columns, mode affine, mxfp4, mxfp8 or nvfp4."""

    bits: int
    group: int
    mode: str

    @property
    def prefix(self) -> str:
        return "affine" if self.mode == "affine" else "fp"


@dataclass(frozen=True)
class Matrices:
    """E matrices [rows, inputs] and the rows of x for each pair, as arrays that kernels read."""

    weights: dict[str, np.ndarray]
    format: Format
    experts: int
    rows: int
    inputs: int


def include_folders() -> tuple[Path, Path]:
    spec = importlib.util.find_spec("mlx")
    folders = list(spec.submodule_search_locations) if spec else []
    root = Path(folders[0]) / "include" if folders else None
    if root is None or not (root / _KERNELS / "quantized.h").exists():
        raise SimulatorError("MLX's kernel headers are missing: pip install 'mlx[cpu]'")
    return changed_headers(root), root


def changed_headers(root: Path) -> Path:
    """Headers that clang would not take: builtins of Apple's compiler, and a cast from half to bfloat."""
    texts = {"bf16_math.h": "#pragma once\n"}
    for name in ("fp4.h", "fp8.h"):
        text = (root / _KERNELS / name).read_text()
        texts[name] = text.replace(
            "static_cast<bfloat16_t>(this->operator float16_t())",
            "static_cast<bfloat16_t>(static_cast<float>(this->operator float16_t()))",
        )
    folder = build.cache_directory() / "apple" / f"mlx-{build.digest(*texts.values())}"
    (folder / _KERNELS).mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / _KERNELS / name).write_text(text)
    return folder


@functools.cache
def library(headers: tuple[str, ...], template: str, constants: tuple = ()) -> shaderlib.ShaderLibrary:
    """A library with one kernel, named "kernel"."""
    lines = [_PRELUDE, *(f'#include "{_KERNELS}/{h}"' for h in headers)]
    lines.append(f'template [[host_name("kernel")]] [[kernel]] decltype({template}) {template};')
    return shaderlib.shader_library("\n".join(lines) + "\n", dict(constants), include_folders())


@dataclass
class Launch:
    """A dispatch: `arguments` by their names in the kernel, bytes for what MLX gives by value."""

    headers: tuple[str, ...]
    template: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    arguments: dict
    constants: tuple = ()

    def run(self, recorder: Recorder) -> Measurement:
        kernels = library(self.headers, self.template, self.constants)
        kernel = shaderlib.kernels_of(kernels.path)["kernel"]
        buffers = {}
        for i in range(kernel.argument_count):
            argument = kernel.arguments[i]
            value = self.arguments.get(argument.name.decode())
            if value is None:
                value = np.int64(0)  # strides and shapes that the kernel does not look at
            buffers[argument.index] = value
        kernels.launch("kernel", buffers, self.grid, self.threads, run=recorder)
        measurement = recorder.measurements[-1]
        measurement.kernel = self.template
        return measurement


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def by_value(kind: type, *values: int) -> bytes:
    return np.array(values, kind).tobytes()


def _headers(format: Format) -> tuple[str, ...]:
    middle = ("quantized_utils.h", "quantized.h" if format.mode == "affine" else "fp_quantized.h")
    return ("utils.h", "steel/gemm/gemm.h", *middle)


# What MLX chooses ------------------------------------------------------------------------------------


def generation(gpu: Gpu) -> int:
    """The number in Metal's name of the architecture: 13 for the M1, 15 for the M3; M4 is 16, M5 17."""
    named_m4 = gpu.name.startswith("M4")
    return {M1: 13, M1 + 1: 14, M3: 16 if named_m4 else 15, M5: 17}[gpu.family]


def size_letter(gpu: Gpu) -> str:
    """The letter at its end: "d" of an Ultra, "s" of Pro and Max, "g" of the others."""
    return "d" if "Ultra" in gpu.name else "s" if "Pro" in gpu.name or "Max" in gpu.name else "g"


def vector_limit(gpu: Gpu, inputs: int, rows: int) -> int:
    """get_qmv_batch_limit: from so many rows of x on, matrices of x are multiplied instead of rows."""
    small, middle = inputs <= 2048 and rows <= 2048, inputs <= 4096 and rows <= 4096
    ultra = size_letter(gpu) == "d"
    if generation(gpu) >= 17 and not ultra:
        return 33 if small else 25 if middle else 13
    if generation(gpu) >= 15 and not ultra:
        return 13 if small else 15 if middle else 13
    if ultra:
        return 32 if small else 18 if middle else 12
    return 14 if small else 10 if middle else 6


def is_fast(format: Format, inputs: int, rows: int) -> bool:
    """qmv_fast_k_alignment, and whole blocks of 8 rows."""
    packed = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}[format.bits]
    return rows % 8 == 0 and inputs % (packed * (1 if format.bits == 2 else 2) * 32) == 0


def is_sorted_product(pairs: int, experts: int) -> bool:
    """GatherQMM::eval_gpu: pairs ordered by expert go as matrices where experts have 4 or more."""
    return pairs >= SORTED_FROM and pairs // experts >= 4


# Launches --------------------------------------------------------------------------------------------


def gather_qmv(
    m: Matrices, x: np.ndarray, x_rows: np.ndarray, ids: np.ndarray, out: np.ndarray, dtype: str
) -> Launch:
    """Row x_rows[p] of x times the matrix of expert ids[p], for each pair p of [tokens, slots]."""
    f, (tokens, slots) = m.format, ids.shape
    name = f"{f.prefix}_gather_qmv{'_fast' if is_fast(f, m.inputs, m.rows) else ''}"
    w, scales = m.weights["w"], m.weights["scales"]
    matrix, groups = w[0].size, scales[0].size
    arguments = {
        **m.weights,
        "x": x,
        "lhs_indices": x_rows.astype(np.uint32),
        "rhs_indices": ids.astype(np.uint32),
        "y": out,
        "in_vec_size": by_value(np.int32, m.inputs),
        "out_vec_size": by_value(np.int32, m.rows),
        "x_batch_ndims": by_value(np.int32, 2),
        "x_shape": by_value(np.int32, len(x), 1, 1, m.inputs),
        "x_strides": by_value(np.int64, m.inputs, m.inputs, m.inputs, 1),
        "w_batch_ndims": by_value(np.int32, 1),
        "w_shape": by_value(np.int32, m.experts, *w.shape[1:]),
        "w_strides": by_value(np.int64, matrix, w.shape[2], 1),
        "s_strides": by_value(np.int64, groups, scales.shape[2], 1),
        "b_strides": by_value(np.int64, groups, scales.shape[2], 1),
        "batch_ndims": by_value(np.int32, 2),
        "batch_shape": by_value(np.int32, tokens, slots),
        "lhs_strides": by_value(np.int64, slots, 1),
        "rhs_strides": by_value(np.int64, slots, 1),
    }
    template = f"{name}<{TYPES[dtype]}, {f.group}, {f.bits}>"
    return Launch(_headers(f), template, (1, ceil_div(m.rows, 8), ids.size), (32, 2, 1), arguments)


def gather_qmm_rhs(
    m: Matrices,
    x: np.ndarray,
    offsets: np.ndarray,
    out: np.ndarray,
    dtype: str,
    tile: tuple = (16, 32, 32, 1, 2),
) -> Launch:
    """Rows of x that are ordered by expert; offsets[e] is the first row of expert e."""
    f, (bm, bn, bk, wm, wn) = m.format, tile
    counts = np.diff([*offsets, len(x)])
    arguments = {
        **m.weights,
        "x": x,
        "offsets": offsets.astype(np.int32),
        "y": out,
        "M": by_value(np.int32, len(x)),
        "N": by_value(np.int32, m.rows),
        "K": by_value(np.int32, m.inputs),
        "num_groups": by_value(np.int32, m.experts),
    }
    template = (
        f"{f.prefix}_gather_qmm_rhs<{TYPES[dtype]}, {f.group}, {f.bits}, {bm}, {bn}, {bk}, {wm}, {wn}, true>"
    )
    aligned = ((200, len(x) % bm == 0), (201, m.rows % bn == 0), (202, m.inputs % bk == 0))
    tiles = int(sum(ceil_div(int(n), bm) for n in counts))
    grid = (ceil_div(m.rows, bn), tiles, 1)
    return Launch(_headers(f), template, grid, (32, wn, wm), arguments, aligned)


def _matrix_arguments(m: Matrices, x: np.ndarray, out: np.ndarray) -> dict:
    sizes = {"in_vec_size": m.inputs, "out_vec_size": m.rows, "K": m.inputs, "N": m.rows, "M": len(x)}
    return {**m.weights, "x": x, "y": out, **{name: by_value(np.int32, n) for name, n in sizes.items()}}


def qmv(m: Matrices, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Each row of x by itself."""
    f = m.format
    name = f"{f.prefix}_qmv{'_fast' if is_fast(f, m.inputs, m.rows) else ''}"
    template = f"{name}<{TYPES[dtype]}, {f.group}, {f.bits}, false>"
    grid = (len(x), ceil_div(m.rows, 8), 1)
    return Launch(_headers(f), template, grid, (32, 2, 1), _matrix_arguments(m, x, out))


def qmv_wide(m: Matrices, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Up to five rows of x at a time."""
    f, count = m.format, len(x)
    vectors = ceil_div(count, ceil_div(count, 5))
    lanes = 8 if f.mode == "affine" else 16
    rows = 32 // lanes * 2
    template = f"{f.prefix}_qmv_wide<{TYPES[dtype]}, {f.group}, {f.bits}, {vectors}, {lanes}, false>"
    grid = (ceil_div(count, vectors), ceil_div(m.rows, rows), 1)
    return Launch(_headers(f), template, grid, (32, 2, 1), _matrix_arguments(m, x, out))


def qmm(m: Matrices, x: np.ndarray, out: np.ndarray, dtype: str, rows_block: int = 32) -> Launch:
    """Tiles of `rows_block` by 32; qmm_splitk, which shares the inputs out, where those are few."""
    f, tiles = m.format, (ceil_div(m.rows, 32), ceil_div(len(x), rows_block))
    step = max(32, f.group)
    parts = min(max(1, 512 // (tiles[0] * tiles[1])), m.inputs // step)
    while parts > 1 and m.inputs % (parts * step):
        parts -= 1
    options, arguments = [str(m.rows % 32 == 0).lower()], _matrix_arguments(m, x, out)
    if parts > 1:
        arguments["k_partition_size"] = by_value(np.int32, m.inputs // parts)
        arguments["split_k_partition_stride"] = by_value(np.int32, out.size)
        arguments["y"] = np.zeros((parts, *out.shape), np.float32)
    else:
        options += ["false"] + (["false", str(rows_block)] if rows_block != 32 else [])
    name = f"{f.prefix}_qmm_t{'_splitk' if parts > 1 else ''}"
    template = f"{name}<{TYPES[dtype]}, {f.group}, {f.bits}, {', '.join(options)}>"
    return Launch(_headers(f), template, (*tiles, parts), (32, 2, 2), arguments)


def quantized_matmul(gpu: Gpu, m: Matrices, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """QuantizedMatmul::eval_gpu and dispatch_qmv, for a transposed matrix."""
    if len(x) >= vector_limit(gpu, m.inputs, m.rows):
        return qmm(m, x, out, dtype)
    # use_qmv_wide: affine formats gain by it from the M3 on.
    if len(x) >= 2 and (m.format.mode != "affine" or generation(gpu) >= 15):
        return qmv_wide(m, x, out, dtype)
    return qmv(m, x, out, dtype)


def measure(launch: Launch, work: Work, recorder: Recorder) -> Measurement:
    measurement = launch.run(recorder)
    measurement.work = work
    return measurement
