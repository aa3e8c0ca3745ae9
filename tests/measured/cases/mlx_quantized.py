"""What MLX dispatches for a product of quantised weights: mlx/backend/metal/quantized.cpp of 0.32.

In 0.32.4 gather_qmm_rhs takes the first row of each expert and finds its tile by a scan; a threadgroup behind
the last tile returns at once, so that the grid is an upper bound.
"""

from simulator.apple.facts import Gpu

from .mlx_launch import TYPES, Launch, Matrices, ceil_div, generation, ints, longs, size_letter

_COMMON = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")
AFFINE, FLOATING = (*_COMMON, "quantized.h"), (*_COMMON, "fp_quantized.h")


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


def is_fast(m: Matrices) -> bool:
    """qmv_fast_k_alignment, and whole blocks of 8 rows."""
    packed = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}[m.format.bits]
    return m.rows % 8 == 0 and m.inputs % (packed * (1 if m.format.bits == 2 else 2) * 32) == 0


def quantized_matmul(gpu: Gpu, m: Matrices, count: int) -> Launch:
    """QuantizedMatmul::eval_gpu and dispatch_qmv: `count` rows of x times one transposed matrix."""
    if count >= vector_limit(gpu, m.inputs, m.rows):
        return qmm(m, count)
    # use_qmv_wide: affine formats gain by it from the M3 on.
    if count >= 2 and (m.format.mode != "affine" or generation(gpu) >= 15):
        return qmv_wide(m, count)
    return qmv(m, count)


def _headers(m: Matrices) -> tuple[str, ...]:
    return AFFINE if m.format.mode == "affine" else FLOATING


def _prefix(m: Matrices) -> str:
    return "affine" if m.format.mode == "affine" else "fp"


def _types(m: Matrices) -> str:
    """The first template arguments of every kernel."""
    return f"{TYPES[m.dtype]}, {m.format.group}, {m.format.bits}"


def gather_qmv(m: Matrices, tokens: int, slots: int, x_rows: int) -> Launch:
    """For each pair of [tokens, slots], one of the `x_rows` rows of x times an expert's matrix."""
    words, groups = m.inputs * m.format.bits // 32, m.inputs // m.format.group
    arguments = {
        **_matrix_arguments(m),
        **{"lhs_indices": "x_rows", "rhs_indices": "ids"},
        "x_batch_ndims": ints(2),
        "x_shape": ints(x_rows, 1, 1, m.inputs),
        "x_strides": longs(m.inputs, m.inputs, m.inputs, 1),
        "w_batch_ndims": ints(1),
        "w_shape": ints(m.experts, m.rows, words),
        "w_strides": longs(m.rows * words, words, 1),
        "s_strides": longs(m.rows * groups, groups, 1),
        "b_strides": longs(m.rows * groups, groups, 1),
        "batch_ndims": ints(2),
        "batch_shape": ints(tokens, slots),
        "lhs_strides": longs(slots, 1),
        "rhs_strides": longs(slots, 1),
    }
    template = f"{_prefix(m)}_gather_qmv{'_fast' if is_fast(m) else ''}<{_types(m)}>"
    return Launch(_headers(m), template, (1, ceil_div(m.rows, 8), tokens * slots), (32, 2, 1), arguments)


def gather_qmm_rhs(
    m: Matrices, pairs: int, tile: tuple = (16, 32, 32, 1, 2), backward: bool = False
) -> Launch:
    """Rows of x that are ordered by expert, one for each pair; backward, times the transposed matrices."""
    bm, bn, bk, wm, wn = tile
    n, k = (m.inputs, m.rows) if backward else (m.rows, m.inputs)
    sizes = {"M": ints(pairs), "N": ints(n), "K": ints(k), "num_groups": ints(m.experts)}
    arguments = {**_matrix_arguments(m), "offsets": "offsets", **sizes}
    transposed = str(not backward).lower()
    template = f"{_prefix(m)}_gather_qmm_rhs<{_types(m)}, {bm}, {bn}, {bk}, {wm}, {wn}, {transposed}>"
    aligned = {200: pairs % bm == 0, 201: n % bn == 0, 202: k % bk == 0}
    grid = (ceil_div(n, bn), ceil_div(pairs, bm) + min(m.experts, pairs), 1)
    return Launch(_headers(m), template, grid, (32, wn, wm), arguments, aligned)


def _matrix_arguments(m: Matrices, count: int = 0) -> dict[str, str | bytes]:
    sizes = {"in_vec_size": m.inputs, "out_vec_size": m.rows, "K": m.inputs, "N": m.rows, "M": count}
    biases = {"biases": "biases"} if m.format.mode == "affine" else {}
    arrays = {"w": "w", "scales": "scales", **biases, "x": "x", "y": "out"}
    return {**arrays, **{name: ints(size) for name, size in sizes.items()}}


def qmv(m: Matrices, count: int) -> Launch:
    """Each row of x by itself."""
    template = f"{_prefix(m)}_qmv{'_fast' if is_fast(m) else ''}<{_types(m)}, false>"
    grid = (count, ceil_div(m.rows, 8), 1)
    return Launch(_headers(m), template, grid, (32, 2, 1), _matrix_arguments(m))


def qmv_wide(m: Matrices, count: int) -> Launch:
    """Up to five rows of x at a time."""
    vectors = ceil_div(count, ceil_div(count, 5))
    lanes = 8 if m.format.mode == "affine" else 16
    grid = (ceil_div(count, vectors), ceil_div(m.rows, 32 // lanes * 2), 1)
    template = f"{_prefix(m)}_qmv_wide<{_types(m)}, {vectors}, {lanes}, false>"
    return Launch(_headers(m), template, grid, (32, 2, 1), _matrix_arguments(m, count))


def qmm(m: Matrices, count: int, rows_block: int = 32) -> Launch:
    """Tiles of `rows_block` by 32; with few tiles MLX takes qmm_splitk, which splits the inputs."""
    tiles = (ceil_div(m.rows, 32), ceil_div(count, rows_block))
    step = max(32, m.format.group)
    parts = min(max(1, 512 // (tiles[0] * tiles[1])), m.inputs // step)
    while parts > 1 and m.inputs % (parts * step):
        parts -= 1
    options, arguments = [str(m.rows % 32 == 0).lower()], _matrix_arguments(m, count)
    if parts > 1:
        arguments["k_partition_size"] = ints(m.inputs // parts)
        arguments["split_k_partition_stride"] = ints(count * m.rows)
    else:
        options += ["false"] + (["false", str(rows_block)] if rows_block != 32 else [])
    template = f"{_prefix(m)}_qmm_t{'_splitk' if parts > 1 else ''}<{_types(m)}, {', '.join(options)}>"
    return Launch(_headers(m), template, (*tiles, parts), (32, 2, 2), arguments, parts=max(1, parts))
