"""MLX's Metal kernels for the same products, launched as cases/mlx.py says, for contiguous arrays.

MLX takes different kernels on different Apple GPUs: for one matrix, every kernel that it takes on any of them
stands beside ours.
"""

import functools
import re
from importlib import metadata
from pathlib import Path

import torch
from simulator.apple.facts import GPUS
from simulator.cuda.plan import Binding, Dispatch, Plan
from simulator.cuda.translate import buffer_indices
from simulator.mlx_kernels import changed_headers, source
from support import oracles_operators

from ..cases import mlx, mlx_attention, mlx_dense, mlx_gated_delta, mlx_quantized
from ..cases.attention import Attention
from ..cases.experts import Case, Experts, Linear
from ..cases.formats import DTYPES, FORMATS, too_far
from ..cases.fused import Delta
from ..cases.gradients import Product
from ..cases.mlx_launch import Launch, Matrices
from ..cases.operators import EPS, differs
from .programs import Program

HEADERS = (
    *(mlx_quantized.AFFINE, mlx_quantized.FLOATING),
    *(mlx_dense.GEMV, mlx_dense.GATHER, mlx_attention.HEADERS),
)
# Function constants of kernels in these headers that are not launched.
UNUSED = {0: False, 1: False, 10: False, 200: True, 201: True, 202: True}


def name_of(headers: tuple[str, ...]) -> str:
    return f"mlx_{Path(headers[-1]).stem}"


def record(plan: Plan, include: Path) -> None:
    """Adds the preprocessed headers to the plan."""
    from .record import preprocessed

    for headers in HEADERS:
        text = preprocessed(source(headers), (changed_headers(include), include))
        # They hold constant expressions of half, which the translation cannot evaluate.
        text = re.sub(r'static_assert\((?:"[^"]*"|[^;"])*;', "", text)
        plan.add_source(name_of(headers), text)
    plan.about["mlx"] = metadata.version("mlx")
    if text := mlx_gated_delta.source():
        plan.add_source(name_of(mlx_gated_delta.HEADERS), preprocessed(text))
        plan.about["mlx_lm"] = metadata.version("mlx-lm")


def peers(plan: Plan, case: Case) -> list[Program]:
    if not plan.files(name_of(mlx_quantized.AFFINE)):
        return []
    if isinstance(case, Attention):
        wanted = case.group != "sanitize" and mlx_attention.has_kernel(case)
        return [attention(plan, case)] if wanted else []
    if isinstance(case, Delta):
        wanted = case.group != "sanitize" and mlx_gated_delta.has_kernel(case)
        return [delta(plan, case)] if wanted and plan.files(name_of(mlx_gated_delta.HEADERS)) else []
    if isinstance(case, Product):
        wanted = case.group != "sanitize" and case.format in FORMATS and case.format != "dense"
        return [slots(plan, case)] if wanted else []
    if isinstance(case, Experts | Linear) and case.format not in FORMATS:
        return []
    if type(case) is Linear and case.format != "dense":
        return linear_peers(plan, case)
    if type(case) is Experts and case.group != "sanitize":
        return [product(plan, case, "gate+up"), product(plan, case, "down")]
    return []


@functools.cache
def indices(path: Path, kernel: str) -> dict[str, int]:
    return buffer_indices(path.read_text(), kernel)


def dispatch(plan: Plan, launch: Launch, arrays: dict[str, str]) -> Dispatch:
    """A launch on the buffers that `arrays` names."""
    (file,) = plan.files(name_of(launch.headers))
    bindings = []
    for name, index in indices(plan.folder / file, launch.kernel).items():
        value = launch.arguments.get(name)
        if isinstance(value, str):
            bindings.append(Binding(index, buffer=arrays[value]))
        elif value is not None:
            bindings.append(Binding(index, data=value.hex()))
    bindings.sort(key=lambda binding: binding.index)
    return Dispatch(
        file, launch.template, launch.grid, launch.threads, bindings, constants=UNUSED | launch.constants
    )


def weight_buffers(name: str, format_: str) -> dict[str, str]:
    if format_ == "dense":
        return {"w": name}
    return {"w": f"{name}_packed", "scales": f"{name}_scales", "biases": f"{name}_zeros"}


def result_of(launch: Launch, rows: int, columns: int, dtype: str) -> tuple[list[int], str]:
    if launch.parts > 1:
        return [launch.parts, rows, columns], "float32"
    return [rows, columns], str(DTYPES[dtype]).removeprefix("torch.")


def attention(plan: Plan, case: Attention) -> Program:
    names = ("q", "k", "v", "partials", "sums", "highest", "result0")
    made = [
        dispatch(plan, launch, dict(zip(names, names, strict=True)))
        for launch in mlx_attention.sdpa_vector(case)
    ]
    rows = case.heads * case.tokens * mlx_attention.blocks_of_keys(case)
    itemsize = DTYPES[case.dtype].itemsize
    scratch = {"partials": rows * case.value_width * itemsize, "sums": 4 * rows, "highest": 4 * rows}
    dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
    results = {"result0": ([1, case.heads, case.tokens, case.value_width], dtype)}

    def wrong(before: dict, after: dict) -> str:
        return too_far(after["result0"], case.expected(before), case.dtype)

    return Program("MLX sdpa_vector_2pass", made, results, wrong, scratch)


def delta(plan: Plan, case: Delta) -> Program:
    """The recurrence alone: MLX norms q, k and the result, and makes decays and beta, in other launches."""

    def derive(t: dict) -> dict:
        def unit(x: torch.Tensor) -> torch.Tensor:
            return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + EPS)

        step = torch.nn.functional.softplus(t["g"].float())
        return {
            "q": (unit(t["q"]) * case.width**-0.5).to(t["q"].dtype),
            "k": unit(t["k"]).to(t["k"].dtype),
            "g": (-t["A_log"].float().exp() * step).exp(),
            "beta": t["beta"].float().sigmoid().to(t["beta"].dtype),
            "state_in": t["state_"].mT.contiguous(),
        }

    def wrong(before: dict, after: dict) -> str:
        given = derive(before) | {"v": before["v"], "state_": before["state_"], "scale": 1.0}
        held = {name: given[name] for name in ("q", "k", "v", "state_", "beta", "scale")}
        value, state = oracles_operators.expected("gated_delta_rule_", held | {"g": given["g"].log()})
        return differs(after["result0"], value) or differs(after["state_out"].mT, state)

    launch = mlx_gated_delta.gated_delta_step(case)
    arrays = {name: name for name in launch.arguments.values() if isinstance(name, str)}
    shapes = {
        "result0": (1, case.tokens, case.heads, case.width),
        "state_out": (1, case.heads, *2 * (case.width,)),
    }
    dtype = str(DTYPES[case.dtype]).removeprefix("torch.")
    results = {
        name: (list(shape), "float32" if name == "state_out" else dtype) for name, shape in shapes.items()
    }
    return Program(f"MLX {launch.kernel}", [dispatch(plan, launch, arrays)], results, wrong, derive=derive)


def linear_peers(plan: Plan, case: Linear) -> list[Program]:
    m = Matrices(FORMATS[case.format], case.dtype, case.outputs, case.inputs_)
    launches = {
        launch.template: launch for launch in (mlx.linear(gpu, m, case.tokens) for gpu in GPUS.values())
    }
    return [linear(plan, case, launch) for launch in launches.values()]


def linear(plan: Plan, case: Linear, launch: Launch) -> Program:
    arrays = {**weight_buffers("weight", case.format), "x": "x", "out": "result0"}
    results = {"result0": result_of(launch, case.tokens, case.outputs, case.dtype)}

    def wrong(before: dict, after: dict) -> str:
        out = after["result0"]
        return case.wrong(before, after | {"result0": out.sum(0) if launch.parts > 1 else out})

    return Program(f"MLX {launch.kernel}", [dispatch(plan, launch, arrays)], results, wrong)


def product(plan: Plan, case: Experts, part: str) -> Program:
    """out[p] = matrix[ids[p]] @ x[p] for every pair; gate and up, which MLX has apart, in one launch."""
    is_first, name = part == "gate+up", case.parts[part]
    inputs, outputs = case.hidden, 2 * case.intermediate
    if not is_first:
        inputs, outputs = case.intermediate, case.hidden
    pairs, format_ = case.tokens * case.top_k, FORMATS[case.format]
    m = Matrices(format_, case.dtype, outputs, inputs, case.experts)
    launch = mlx.experts(m, case.tokens, case.top_k, case.tokens if is_first else pairs)
    is_sorted = "offsets" in launch.arguments
    x = "x" if is_first and not is_sorted else "rows"

    def rows(t: dict) -> torch.Tensor:
        """A row for each pair: of x, or of what stands for the first product's result."""
        if is_first:
            return t["x"].repeat_interleave(case.top_k, 0)
        generator = torch.Generator(t["x"].device).manual_seed(1)
        return torch.randn(pairs, inputs, device=t["x"].device, generator=generator).to(t["x"].dtype)

    def order(t: dict) -> torch.Tensor:
        return t["ids"].flatten().sort(stable=True).indices

    def derive(t: dict) -> dict:
        if is_sorted:
            counts = torch.bincount(t["ids"].flatten(), minlength=case.experts)
            return {"rows": rows(t)[order(t)], "offsets": (counts.cumsum(0) - counts).int()}
        pair = torch.arange(pairs, dtype=torch.int32, device=t["x"].device)
        return {"x_rows": pair // case.top_k} if is_first else {"x_rows": pair, "rows": rows(t)}

    def wrong(before: dict, after: dict) -> str:
        expected = torch.empty(pairs, outputs, dtype=torch.float64, device=before["x"].device)
        x, ids = rows(before), before["ids"].flatten()
        for e in ids.unique().tolist():
            of_expert = (ids == e).nonzero()[:, 0]
            expected[of_expert] = x[of_expert].double() @ format_.matrix(before, name, e).T
        return too_far(after["product"], expected[order(before)] if is_sorted else expected, case.dtype)

    arrays = {**weight_buffers(name, case.format), "x": x, "out": "product"}
    arrays |= {array: array for array in ("x_rows", "ids", "offsets")}
    results = {"product": result_of(launch, pairs, outputs, case.dtype)}
    made = [dispatch(plan, launch, arrays)]
    return Program(f"MLX {launch.kernel}", made, results, wrong, part=part, derive=derive)


def slots(plan: Plan, case: Product) -> Program:
    """A row for each pair times its expert's matrix or, as the gradient of one, the transposed matrix."""
    pairs, m = (
        case.tokens * case.top_k,
        Matrices(FORMATS[case.format], case.dtype, case.rows, case.columns, case.experts),
    )
    launch = mlx_quantized.gather_qmm_rhs(m, pairs, backward=case.transposed)

    def order(t: dict) -> torch.Tensor:
        return t["ids"].flatten().sort(stable=True).indices

    def derive(t: dict) -> dict:
        counts = torch.bincount(t["ids"].flatten(), minlength=case.experts)
        return {"rows": t["x"].flatten(0, 1)[order(t)], "offsets": (counts.cumsum(0) - counts).int()}

    def wrong(before: dict, after: dict) -> str:
        return too_far(after["product"], case.expected(before)[order(before)], case.dtype)

    arrays = {**weight_buffers("weight", case.format), "x": "rows", "offsets": "offsets", "out": "product"}
    width = case.columns if case.transposed else case.rows
    results = {"product": result_of(launch, pairs, width, case.dtype)}
    made = [dispatch(plan, launch, arrays)]
    return Program(f"MLX {launch.kernel}", made, results, wrong, derive=derive)
