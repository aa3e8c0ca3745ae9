"""MLX's kernels for weights of 16 or 32 bits, as mlx/backend/metal/matmul.cpp of 0.32.2 dispatches them."""

import struct

import numpy as np

from .facts import Gpu
from .mlx import SORTED_FROM, TYPES, Launch, by_value, ceil_div, generation, size_letter

_GEMV = ("utils.h", "gemv.h")
_STEEL = ("utils.h", "steel/gemm/gemm.h")


def is_sorted_product(pairs: int) -> bool:
    """GatherMM::eval_gpu: whatever the experts hold, once mlx_lm has ordered the pairs by expert."""
    return pairs >= SORTED_FROM


def gather_mv(
    w: np.ndarray, x: np.ndarray, x_rows: np.ndarray, ids: np.ndarray, out: np.ndarray, dtype: str
) -> Launch:
    """Row x_rows[p] of x times the matrix of expert ids[p], for each pair p of [tokens, slots]."""
    (experts, rows, inputs), (tokens, slots) = w.shape, ids.shape
    bm, tm = 8 if rows >= 4096 else 4, 4
    arguments = {
        "mat": w,
        "in_vec": x,
        "bias": out,
        "out_vec": out,
        "in_vec_size": by_value(np.int32, inputs),
        "out_vec_size": by_value(np.int32, rows),
        "marix_ld": by_value(np.int32, inputs),
        "batch_ndim": by_value(np.int32, 2),
        "batch_shape": by_value(np.int32, tokens, slots),
        "index_batch_strides": by_value(np.int64, slots, 1, slots, 1),
        "vector_batch_ndim": by_value(np.int32, 2),
        "vector_batch_shape": by_value(np.int32, len(x), 1, 1, inputs),
        "vector_batch_stride": by_value(np.int64, inputs, inputs, inputs, 1),
        "matrix_batch_ndim": by_value(np.int32, 1),
        "matrix_batch_shape": by_value(np.int32, experts, inputs, rows),
        "matrix_batch_stride": by_value(np.int64, rows * inputs, 1, inputs),
        "vec_indices": x_rows.astype(np.uint32),
        "mat_indices": ids.astype(np.uint32),
    }
    template = f"gemv_gather<{TYPES[dtype]}, {bm}, 1, 1, 32, {tm}, 4>"
    return Launch(_GEMV, template, (ceil_div(rows, bm * tm), 1, ids.size), (32, 1, bm), arguments)


def gather_mm_rhs(w: np.ndarray, x: np.ndarray, offsets: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Rows of x that are ordered by expert; offsets[e] is the first row of expert e."""
    (experts, rows, inputs), (bm, bn, bk, wm, wn) = w.shape, (16, 64, 16, 1, 2)
    tiles = int(sum(ceil_div(int(n), bm) for n in np.diff([*offsets, len(x)])))
    grid = (ceil_div(rows, bn), tiles, 1)
    arguments = {
        **{"A": x, "B": w, "C": out, "offsets": offsets.astype(np.int32)},
        "num_groups": by_value(np.int32, experts),
        "params": _gemm_params(len(x), rows, inputs, (bm, bn, bk), rows * inputs),
    }
    template = f"gather_mm_rhs<{TYPES[dtype]}, {bm}, {bn}, {bk}, {wm}, {wn}, false, true>"
    headers = (*_STEEL, "steel/gemm/kernels/steel_gemm_gather.h")
    aligned = _alignment(len(x), rows, inputs, (bm, bn, bk))
    return Launch(headers, template, grid, (32, wn, wm), arguments, aligned)


def _alignment(m: int, n: int, k: int, block: tuple[int, int, int]) -> tuple:
    return ((10, False), (200, m % block[0] == 0), (201, n % block[1] == 0), (202, k % block[2] == 0))


def _gemm_params(m: int, n: int, k: int, block: tuple[int, int, int], matrix: int = 0) -> bytes:
    """struct GEMMParams of steel/gemm/params.h."""
    tiles = (ceil_div(n, block[1]), ceil_div(m, block[0]))
    return struct.pack("<8i3q4i", m, n, k, k, k, n, *tiles, 0, matrix, 0, 0, k // block[2], 1, 0)


def gemv(w: np.ndarray, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """One row of x times one matrix."""
    rows, inputs = w.shape
    bm, bn, sm, sn = (8 if rows >= 4096 else 4), 1, 1, 32
    if inputs <= 64:
        bm, sm, sn = 1, 8, 4
    elif inputs >= 16 * rows:
        bm, bn = 1, 8
    sizes = {
        "in_vec_size": inputs,
        "out_vec_size": rows,
        "marix_ld": inputs,
        "batch_ndim": 1,
        "batch_shape": 1,
    }
    arguments = {
        **{"mat": w, "in_vec": x, "bias": out, "out_vec": out},
        **{name: by_value(np.int32, value) for name, value in sizes.items()},
        "vector_batch_stride": by_value(np.int64, 0),
        "matrix_batch_stride": by_value(np.int64, 0),
    }
    template = f"gemv<{TYPES[dtype]}, {bm}, {bn}, {sm}, {sn}, 4, 4, false, false>"
    return Launch(_GEMV, template, (ceil_div(rows, bm * sm * 4), 1, 1), (32, bn, bm), arguments)


def gemv_wide(w: np.ndarray, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Up to five rows of x at a time times one matrix."""
    (rows, inputs), passes = w.shape, ceil_div(len(x), 5)
    vectors, lanes = ceil_div(len(x), passes), 32 if passes == 1 or rows <= 64 else 16
    sizes = {
        "in_vec_size": inputs,
        "out_vec_size": rows,
        "M": len(x),
        "matrix_ld": inputs,
        "vector_ld": inputs,
    }
    arguments = {
        **{"mat": w, "in_vec": x, "out_vec": out},
        **{name: by_value(np.int32, value) for name, value in sizes.items()},
        "batch_ndim": by_value(np.int32, 1),
        "batch_shape": by_value(np.int32, 1),
    }
    template = f"gemv_wide<{TYPES[dtype]}, {vectors}, {lanes}>"
    grid = (1 if rows >= 65536 else passes, ceil_div(rows, 4), 1)
    constants = ((0, False), (1, False))
    return Launch(_GEMV, template, grid, (32, lanes // 8, 1), arguments, constants)


def gemm(gpu: Gpu, w: np.ndarray, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Tiles of the product (steel_matmul_regular)."""
    (rows, inputs), letter = w.shape, size_letter(gpu)
    bm, bn, bk, wm, wn = 64, 64, 16, 2, 2
    if letter == "d" and len(x) * rows >= 1 << 20 and 2 * max(len(x), rows) > inputs:
        wm, wn = 1, 2
    elif letter != "s":
        bm, bn, bk = 64, 32, 32
    template = f"gemm<{TYPES[dtype]}, {bm}, {bn}, {bk}, {wm}, {wn}, false, true>"
    params = _gemm_params(len(x), rows, inputs, (bm, bn, bk))
    headers = (*_STEEL, "steel/gemm/kernels/steel_gemm_fused.h")
    constants = ((100, False), (110, False), *_alignment(len(x), rows, inputs, (bm, bn, bk)))
    grid = (ceil_div(rows, bn), ceil_div(len(x), bm), 1)
    arguments = {"A": x, "B": w, "D": out, "params": params}
    return Launch(headers, template, grid, (32, wn, wm), arguments, constants)


def gemm_splitk(w: np.ndarray, x: np.ndarray, dtype: str) -> Launch:
    """Tiles of parts of the inputs, for small products of many inputs; without the sum of the parts."""
    (rows, inputs), (bm, bn, bk) = w.shape, (16 if len(x) < 40 else 32, 16 if w.shape[0] < 40 else 32, 16)
    wanted = inputs // 16 // (ceil_div(len(x), 32) * ceil_div(rows, 32))
    parts = min(max(2, 1 << max(0, wanted - 1).bit_length()), 32)
    steps = inputs // bk // parts
    tiles = (ceil_div(rows, bn), ceil_div(len(x), bm))
    out = np.zeros((parts, len(x), rows), np.float32)
    params = (len(x), rows, inputs, inputs, inputs, rows, *tiles, parts, len(x) * rows, steps * bk, 0, steps)
    aligned = [str(a).lower() for a in (len(x) % bm == 0 and rows % bn == 0, inputs % bk == 0)]
    template = (
        f"gemm_splitk<{TYPES[dtype]}, float, {bm}, {bn}, {bk}, 2, 2, false, true, {', '.join(aligned)}>"
    )
    headers = (*_STEEL, "steel/gemm/kernels/steel_gemm_splitk.h")
    arguments = {"A": x, "B": w, "C": out, "params": struct.pack("<13i", *params)}
    return Launch(headers, template, (*tiles, parts), (32, 2, 2), arguments)


def matmul(gpu: Gpu, w: np.ndarray, x: np.ndarray, out: np.ndarray, dtype: str) -> Launch:
    """Matmul::eval_gpu for x [M, K] and a transposed matrix [N, K]."""
    (rows, inputs), m = w.shape, len(x)
    if generation(gpu) >= 15 and 2 <= m <= 15 and inputs % 4 == 0 and dtype != "f32":
        return gemv_wide(w, x, out, dtype)
    if m == 1:
        return gemv(w, x, out, dtype)
    tiles = ceil_div(m, 16) * ceil_div(rows, 16)
    if tiles <= (1024 if size_letter(gpu) == "g" else 2048) and inputs >= max(m, rows, 128):
        return gemm_splitk(w, x, dtype)
    return gemm(gpu, w, x, out, dtype)
