"""MLX's Metal kernels for the same products, from the headers of an installed `mlx` wheel.

Grids, threads and arguments are those of MLX's own dispatch code (mlx/backend/metal/quantized.cpp and
matmul.cpp; each function names its counterpart), for contiguous arrays. In 0.32.4 gather_qmm_rhs and
gather_mm_rhs take the first row of each expert instead of each row's expert, and find their tile by a scan: a
threadgroup behind the last tile returns at once, so the grid is the upper bound of the tiles.
"""

import re
from importlib import metadata
from pathlib import Path

import torch

from .cases import Case, Experts, Linear
from .formats import DTYPES, FORMATS, Format, too_far
from .plan import Binding, Dispatch, Plan
from .programs import Program, bind, buffers, ceil_div, longs, words

KERNELS = "mlx/backend/metal/kernels"
SOURCES = {
    "mlx_quantized": ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"),
    "mlx_fp_quantized": ("steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"),
    "mlx_gemm": ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_gather.h"),
    "mlx_gemv": ("gemv.h",),
}
UNUSED = {0: False, 1: False}  # function constants of kernels in gemv.h that are not launched
# gemv.h marks values that a simdgroup shares.
PRELUDE = """#include <metal_stdlib>
template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T value) { return value; }"""
TYPES = {"f32": "float", "f16": "float16_t", "bf16": "bfloat16_t"}
ALIGNED = {
    200: True,
    201: True,
    202: True,
    10: False,
}  # function constants: rows, columns and inputs fill tiles


def folder() -> Path | None:
    """The include folder of an installed wheel."""
    try:
        path = Path(str(metadata.distribution("mlx").locate_file("mlx/include")))
    except metadata.PackageNotFoundError:
        return None
    return path if has_kernels(path) else None


def has_kernels(include: Path) -> bool:
    return (include / KERNELS / "quantized.h").exists()


def record(plan: Plan, include: Path, work: Path) -> None:
    """Adds the preprocessed headers to the plan. `work` is an empty folder for headers that replace MLX's."""
    from .record import preprocessed

    replaced = work / KERNELS
    replaced.mkdir(parents=True)
    for name in ("bf16_math.h", "logging.h"):  # builtins of Apple's compiler, which these kernels do not use
        (replaced / name).write_text("#pragma once\n")
    for name, headers in SOURCES.items():
        lines = [f'#include "{KERNELS}/{header}"' for header in ("utils.h", *headers)]
        text = preprocessed("\n".join([PRELUDE, *lines]), (work, include))
        # They hold constant expressions of half, which the translation cannot evaluate.
        text = re.sub(r'static_assert\((?:"[^"]*"|[^;"])*;', "", text)
        plan.add_source(name, text)
    plan.about["mlx"] = metadata.version("mlx")


def peers(plan: Plan, case: Case) -> list[Program]:
    if not plan.files("mlx_quantized"):
        return []
    if isinstance(case, Linear) and FORMATS[case.format].mode == "affine":
        return linear_peers(plan, case)
    if isinstance(case, Experts) and case.group != "sanitize":
        return [product(plan, case, "gate+up"), product(plan, case, "down")]
    return []


class Product:
    """out[p] = matrix[ids[p]] @ rows[p] for every pair, as MLX's gather operators have it."""

    def __init__(self, plan: Plan, case: Experts, part: str):
        self.plan, self.case, self.name = plan, case, case.parts[part]
        self.part, self.format = part, FORMATS[case.format]
        self.pairs = case.tokens * case.top_k
        self.inputs, self.outputs = case.hidden, 2 * case.intermediate
        if part == "down":
            self.inputs, self.outputs = case.intermediate, case.hidden

    def matrix(self) -> list[str]:
        if self.format.bits == 0:
            return [self.name]
        biases = f"{self.name}_biases" if self.format.mode == "affine" else ""
        return [f"{self.name}_packed", f"{self.name}_scales", biases]

    def rows(self, t: dict) -> torch.Tensor:
        """A row for each pair: of x, or of what stands for the first product's result."""
        if self.part == "gate+up":
            return t["x"].repeat_interleave(self.case.top_k, 0)
        generator = torch.Generator(t["x"].device).manual_seed(1)
        shape = (self.pairs, self.inputs)
        return torch.randn(shape, device=t["x"].device, generator=generator).to(t["x"].dtype)

    def program(self, kernel: str, dispatch: Dispatch, derive, order=lambda t: slice(None)) -> Program:
        def wrong(before: dict, after: dict) -> str:
            expected = torch.empty(self.pairs, self.outputs, dtype=torch.float64, device=before["x"].device)
            rows, ids = self.rows(before), before["ids"].flatten()
            for e in ids.unique().tolist():
                pairs = (ids == e).nonzero()[:, 0]
                expected[pairs] = rows[pairs].double() @ self.format.matrix(before, self.name, e).T
            return too_far(after["product"], expected[order(before)], self.case.dtype)

        dtype = str(DTYPES[self.case.dtype]).removeprefix("torch.")
        results = {"product": ([self.pairs, self.outputs], dtype)}
        return Program(f"MLX {kernel}", [dispatch], results, wrong, part=self.part, derive=derive)


def product(plan: Plan, case: Experts, part: str) -> Program:
    """GatherQMM::eval_gpu and GatherMM::eval_gpu, for ids that mlx-lm's SwitchGLU sorts from 64 on."""
    p = Product(plan, case, part)
    if p.format.bits == 0:
        return gather_mm_rhs(p) if p.pairs >= 64 else gather_mv(p)
    return gather_qmm_rhs(p) if p.pairs >= 64 and p.pairs // case.experts >= 4 else gather_qmv(p)


def source_file(plan: Plan, format_: Format) -> str:
    return plan.files("mlx_fp_quantized" if format_.mode == "mxfp4" else "mlx_quantized")[0]


def is_fast(inputs: int, outputs: int, bits: int) -> bool:
    """qmv_fast_k_alignment"""
    return outputs % 8 == 0 and inputs % (32 // bits * 64) == 0


def unsorted_inputs(p: Product):
    """The buffer of rows, how many it has, and what picks a row for each pair."""
    is_first = p.part == "gate+up"

    def derive(t: dict) -> dict:
        pair = torch.arange(p.pairs, dtype=torch.int32, device=t["x"].device)
        return {"pair_rows": pair // p.case.top_k} if is_first else {"pair_rows": pair, "rows": p.rows(t)}

    return ("x", p.case.tokens, derive) if is_first else ("rows", p.pairs, derive)


def gather_qmv(p: Product) -> Program:
    n, k, bits, group = p.outputs, p.inputs, p.format.bits, p.format.group_size
    affine = p.format.mode == "affine"
    name = ("affine_" if affine else "fp_") + "gather_qmv" + ("_fast" if is_fast(k, n, bits) else "")
    rows, count, derive = unsorted_inputs(p)
    matrix = [words(12, 1), words(13, p.case.experts, n, k * bits // 32), longs(14, n * k * bits // 32)]
    matrix += [longs(i, n * k // group) for i in ((15, 16) if affine else (15,))]
    c = 12 + len(matrix)
    dispatch = Dispatch(
        library=source_file(p.plan, p.format),
        kernel=f"{name}<{TYPES[p.case.dtype]}, {group}, {bits}>",
        grid=(1, ceil_div(n, 8), p.pairs),
        threads=(32, 2, 1),
        bindings=[
            *buffers(*p.matrix(), rows, "pair_rows", "ids", "product"),
            *(words(7, k), words(8, n), words(9, 1), words(10, count, 1, k), longs(11, k, k, 1)),
            *matrix,
            *(words(c, 1), words(c + 1, p.pairs), longs(c + 2, 1), longs(c + 3, 1)),
        ],
        constants=ALIGNED,
    )
    return p.program(name, dispatch, derive)


def sorted_inputs(p: Product):
    """The order of the pairs by expert, and what the kernels want: rows in it, the first of each expert."""

    def order(t: dict) -> torch.Tensor:
        return t["ids"].flatten().sort(stable=True).indices

    def derive(t: dict) -> dict:
        counts = torch.bincount(t["ids"].flatten(), minlength=p.case.experts)
        return {"rows": p.rows(t)[order(t)], "offsets": (counts.cumsum(0) - counts).int()}

    return order, derive


def gather_qmm_rhs(p: Product) -> Program:
    affine = p.format.mode == "affine"
    name = ("affine" if affine else "fp") + "_gather_qmm_rhs"
    types = f"{TYPES[p.case.dtype]}, {p.format.group_size}, {p.format.bits}"
    order, derive = sorted_inputs(p)
    dispatch = Dispatch(
        library=source_file(p.plan, p.format),
        kernel=f"{name}<{types}, 16, 32, 32, 1, 2, true>",
        grid=(ceil_div(p.outputs, 32), ceil_div(p.pairs, 16) + min(p.case.experts, p.pairs), 1),
        threads=(32, 2, 1),
        bindings=[
            *buffers("rows", *p.matrix(), "offsets", "product"),
            *(words(6, p.pairs), words(7, p.outputs), words(8, p.inputs), words(9, p.case.experts)),
        ],
        constants=alignment(p, 32, 32),
    )
    return p.program(name, dispatch, derive, order)


def alignment(p: Product, columns: int, inputs: int) -> dict:
    return ALIGNED | {200: p.pairs % 16 == 0, 201: p.outputs % columns == 0, 202: p.inputs % inputs == 0}


def gather_mm_rhs(p: Product) -> Program:
    m, n, k = p.pairs, p.outputs, p.inputs
    order, derive = sorted_inputs(p)
    tiles = ceil_div(n, 64), ceil_div(m, 16) + min(p.case.experts, m)
    # GEMMParams: sizes and row lengths, tiles, batch strides, swizzle, steps, batch dimensions.
    params = [words(4, m, n, k, k, k, n, *tiles), longs(4, 0, n * k, 0), words(4, 0, k // 16, 0, 0)]
    params = Binding(4, data="".join(part.data for part in params))
    dispatch = Dispatch(
        library=p.plan.files("mlx_gemm")[0],
        kernel=f"gather_mm_rhs<{TYPES[p.case.dtype]}, 16, 64, 16, 1, 2, false, true, float>",
        grid=(*tiles, 1),
        threads=(32, 2, 1),
        bindings=[*buffers("rows", p.name, "offsets", "product"), params, words(5, p.case.experts)],
        constants=alignment(p, 64, 16),
    )
    return p.program("gather_mm_rhs", dispatch, derive, order)


def gather_mv(p: Product) -> Program:
    n, k = p.outputs, p.inputs
    simdgroups = 8 if n >= 4096 else 4
    rows, count, derive = unsorted_inputs(p)
    dispatch = Dispatch(
        library=p.plan.files("mlx_gemv")[0],
        kernel=f"gemv_gather<{TYPES[p.case.dtype]}, {simdgroups}, 1, 1, 32, 4, 4>",
        grid=(ceil_div(n, 4 * simdgroups), 1, p.pairs),
        threads=(32, 1, simdgroups),
        bindings=[
            *buffers(p.name, rows, "", "product"),
            *(words(4, k), words(5, n), words(6, k)),
            *(words(9, 1), words(10, p.pairs), longs(11, 1, 1)),
            *(words(12, 1), words(13, count), longs(14, k)),
            *(words(15, 1), words(16, p.case.experts), longs(17, n * k)),
            *(bind(18, "pair_rows"), bind(19, "ids")),
        ],
        constants=UNUSED,
    )
    return p.program("gather_mv", dispatch, derive)


def linear_peers(plan: Plan, case: Linear) -> list[Program]:
    """QuantizedMatmul::eval_gpu: qmv for a row; for a few qmv_wide, or qmv on GPUs older than the M3's; qmm_t
    from 6 to 33 rows on, by GPU and shape."""
    programs = [qmv(plan, case)] if case.tokens <= 8 else []
    programs += [qmv_wide(plan, case)] if 2 <= case.tokens <= 32 else []
    return programs + ([qmm_t(plan, case)] if case.tokens >= 8 else [])


def linear(plan: Plan, case: Linear, name: str, more: str, grid: tuple, threads: tuple) -> Program:
    format_ = FORMATS[case.format]
    types = f"{TYPES[case.dtype]}, {format_.group_size}, {format_.bits}"
    dispatch = Dispatch(
        library=source_file(plan, format_),
        kernel=f"affine_{name}<{types}, {more}>",
        grid=grid,
        threads=threads,
        bindings=[
            *buffers("weight_packed", "weight_scales", "weight_biases", "x", "result0"),
            *(words(5, case.inputs_), words(6, case.outputs)),
            *(words(7, case.tokens) for _ in range(name in ("qmv_wide", "qmm_t"))),
        ],
        constants=ALIGNED,
    )
    dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
    results = {"result0": ([case.tokens, 1, case.outputs], dtype)}
    return Program(f"MLX {name}", [dispatch], results, case.wrong)


def qmv(plan: Plan, case: Linear) -> Program:
    fast = is_fast(case.inputs_, case.outputs, FORMATS[case.format].bits)
    grid = (case.tokens, ceil_div(case.outputs, 8), 1)
    return linear(plan, case, "qmv_fast" if fast else "qmv", "false", grid, (32, 2, 1))


def qmv_wide(plan: Plan, case: Linear) -> Program:
    tiles = ceil_div(case.tokens, 5)
    vectors, lanes = ceil_div(case.tokens, tiles), 8
    rows = 32 // lanes * 2
    grid = (ceil_div(case.tokens, vectors), ceil_div(case.outputs, rows), 1)
    return linear(plan, case, "qmv_wide", f"{vectors}, {lanes}, false", grid, (32, 2, 1))


def qmm_t(plan: Plan, case: Linear) -> Program:
    grid = (ceil_div(case.outputs, 32), ceil_div(case.tokens, 32), 1)
    aligned = "true" if case.outputs % 32 == 0 else "false"
    return linear(plan, case, "qmm_t", f"{aligned}, false", grid, (32, 2, 2))
