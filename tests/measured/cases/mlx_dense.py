"""What MLX dispatches for a product of dense weights: mlx/backend/metal/matmul.cpp of 0.32."""

import struct

from simulator.apple.facts import Gpu

from .mlx_launch import TYPES, Launch, Matrices, ceil_div, generation, ints, longs, size_letter

GEMV = ("utils.h", "gemv.h")
_STEEL = ("utils.h", "steel/gemm/gemm.h")
GATHER = (*_STEEL, "steel/gemm/kernels/steel_gemm_gather.h")
_FUSED = (*_STEEL, "steel/gemm/kernels/steel_gemm_fused.h")
_SPLIT = (*_STEEL, "steel/gemm/kernels/steel_gemm_splitk.h")


def matmul(gpu: Gpu, m: Matrices, count: int) -> Launch:
    """Matmul::eval_gpu: `count` rows of x times one transposed matrix."""
    if generation(gpu) >= 15 and 2 <= count <= 15 and m.inputs % 4 == 0 and m.dtype != "f32":
        return gemv_wide(m, count)
    if count == 1:
        return gemv(m)
    tiles = ceil_div(count, 16) * ceil_div(m.rows, 16)
    if tiles <= (1024 if size_letter(gpu) == "g" else 2048) and m.inputs >= max(count, m.rows, 128):
        return gemm_splitk(m, count)
    return gemm(gpu, m, count)


def gather_mv(m: Matrices, tokens: int, slots: int, x_rows: int) -> Launch:
    """For each pair of [tokens, slots], one of the `x_rows` rows of x times an expert's matrix."""
    bm, tm = 8 if m.rows >= 4096 else 4, 4
    arguments = {
        **{"mat": "w", "in_vec": "x", "bias": "out", "out_vec": "out"},
        **{"vec_indices": "x_rows", "mat_indices": "ids"},
        "in_vec_size": ints(m.inputs),
        "out_vec_size": ints(m.rows),
        "marix_ld": ints(m.inputs),
        "batch_ndim": ints(2),
        "batch_shape": ints(tokens, slots),
        "index_batch_strides": longs(slots, 1, slots, 1),
        "vector_batch_ndim": ints(2),
        "vector_batch_shape": ints(x_rows, 1, 1, m.inputs),
        "vector_batch_stride": longs(m.inputs, m.inputs, m.inputs, 1),
        "matrix_batch_ndim": ints(1),
        "matrix_batch_shape": ints(m.experts, m.inputs, m.rows),
        "matrix_batch_stride": longs(m.rows * m.inputs, 1, m.inputs),
    }
    template = f"gemv_gather<{TYPES[m.dtype]}, {bm}, 1, 1, 32, {tm}, 4>"
    return Launch(GEMV, template, (ceil_div(m.rows, bm * tm), 1, tokens * slots), (32, 1, bm), arguments)


def gather_mm_rhs(m: Matrices, pairs: int) -> Launch:
    """Rows of x that are ordered by expert, one for each pair."""
    bm, bn, bk, wm, wn = 16, 64, 16, 1, 2
    grid = (ceil_div(m.rows, bn), ceil_div(pairs, bm) + min(m.experts, pairs), 1)
    arguments = {
        **{"A": "x", "B": "w", "C": "out", "offsets": "offsets"},
        "num_groups": ints(m.experts),
        "params": _gemm_params(m, pairs, (bm, bn, bk), m.rows * m.inputs),
    }
    template = f"gather_mm_rhs<{TYPES[m.dtype]}, {bm}, {bn}, {bk}, {wm}, {wn}, false, true>"
    return Launch(GATHER, template, grid, (32, wn, wm), arguments, _alignment(m, pairs, (bm, bn, bk)))


def _alignment(m: Matrices, count: int, block: tuple[int, int, int]) -> dict[int, bool]:
    fills = (count % block[0] == 0, m.rows % block[1] == 0, m.inputs % block[2] == 0)
    return {10: False, **dict(zip((200, 201, 202), fills, strict=True))}


def _gemm_params(m: Matrices, count: int, block: tuple[int, int, int], matrix: int = 0) -> bytes:
    """struct GEMMParams of steel/gemm/params.h."""
    tiles = (ceil_div(m.rows, block[1]), ceil_div(count, block[0]))
    sizes = (count, m.rows, m.inputs, m.inputs, m.inputs, m.rows)
    return struct.pack("<8i3q4i", *sizes, *tiles, 0, matrix, 0, 0, m.inputs // block[2], 1, 0)


def gemv(m: Matrices) -> Launch:
    """One row of x times one matrix."""
    bm, bn, sm, sn = (8 if m.rows >= 4096 else 4), 1, 1, 32
    if m.inputs <= 64:
        bm, sm, sn = 1, 8, 4
    elif m.inputs >= 16 * m.rows:
        bm, bn = 1, 8
    arguments = {
        **{"mat": "w", "in_vec": "x", "bias": "out", "out_vec": "out"},
        "in_vec_size": ints(m.inputs),
        "out_vec_size": ints(m.rows),
        "marix_ld": ints(m.inputs),
        "batch_ndim": ints(1),
        "batch_shape": ints(1),
        "vector_batch_stride": longs(0),
        "matrix_batch_stride": longs(0),
    }
    template = f"gemv<{TYPES[m.dtype]}, {bm}, {bn}, {sm}, {sn}, 4, 4, false, false>"
    return Launch(GEMV, template, (ceil_div(m.rows, bm * sm * 4), 1, 1), (32, bn, bm), arguments)


def gemv_wide(m: Matrices, count: int) -> Launch:
    """Up to five rows of x at a time times one matrix."""
    passes = ceil_div(count, 5)
    vectors, lanes = ceil_div(count, passes), 32 if passes == 1 or m.rows <= 64 else 16
    arguments = {
        **{"mat": "w", "in_vec": "x", "out_vec": "out"},
        "in_vec_size": ints(m.inputs),
        "out_vec_size": ints(m.rows),
        "M": ints(count),
        "matrix_ld": ints(m.inputs),
        "vector_ld": ints(m.inputs),
        "batch_ndim": ints(1),
        "batch_shape": ints(1),
    }
    template = f"gemv_wide<{TYPES[m.dtype]}, {vectors}, {lanes}>"
    grid = (1 if m.rows >= 65536 else passes, ceil_div(m.rows, 4), 1)
    return Launch(GEMV, template, grid, (32, lanes // 8, 1), arguments, {0: False, 1: False})


def gemm(gpu: Gpu, m: Matrices, count: int) -> Launch:
    """Tiles of the product (steel_matmul_regular)."""
    letter = size_letter(gpu)
    bm, bn, bk, wm, wn = 64, 64, 16, 2, 2
    if letter == "d" and count * m.rows >= 1 << 20 and 2 * max(count, m.rows) > m.inputs:
        wm, wn = 1, 2
    elif letter != "s":
        bm, bn, bk = 64, 32, 32
    template = f"gemm<{TYPES[m.dtype]}, {bm}, {bn}, {bk}, {wm}, {wn}, false, true>"
    constants = {100: False, 110: False, **_alignment(m, count, (bm, bn, bk))}
    grid = (ceil_div(m.rows, bn), ceil_div(count, bm), 1)
    arguments = {"A": "x", "B": "w", "D": "out", "params": _gemm_params(m, count, (bm, bn, bk))}
    return Launch(_FUSED, template, grid, (32, wn, wm), arguments, constants)


def gemm_splitk(m: Matrices, count: int) -> Launch:
    """Tiles of parts of the inputs, for small products of many inputs."""
    bm, bn, bk = 16 if count < 40 else 32, 16 if m.rows < 40 else 32, 16
    wanted = m.inputs // 16 // (ceil_div(count, 32) * ceil_div(m.rows, 32))
    parts = min(max(2, 1 << max(0, wanted - 1).bit_length()), 32)
    steps = m.inputs // bk // parts
    tiles = (ceil_div(m.rows, bn), ceil_div(count, bm))
    sizes = (count, m.rows, m.inputs, m.inputs, m.inputs, m.rows)
    params = struct.pack("<13i", *sizes, *tiles, parts, count * m.rows, steps * bk, 0, steps)
    aligned = [str(a).lower() for a in (count % bm == 0 and m.rows % bn == 0, m.inputs % bk == 0)]
    template = (
        f"gemm_splitk<{TYPES[m.dtype]}, float, {bm}, {bn}, {bk}, 2, 2, false, true, {', '.join(aligned)}>"
    )
    arguments = {"A": "x", "B": "w", "C": "out", "params": params}
    return Launch(_SPLIT, template, (*tiles, parts), (32, 2, 2), arguments, parts=parts)
