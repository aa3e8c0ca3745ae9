"""The source kernels: the Metal kernels that the operators stand for, out of files that are no part of this
repository (`--sources DIR`; a file's Metal begins at its first include).

Their launches are those of the code around them: threads and threadgroup memory per row, 32-bit numbers as
parameters. Several serve one token and are launched once for each.
"""

import re
from pathlib import Path

import torch
from simulator.cuda.plan import Dispatch, Plan

from ..cases.experts import Case, Experts
from ..cases.layer import Bucket, Gate, Norm, Router, SiluMul, WeightedSum
from ..cases.mlx_launch import ceil_div
from ..cases.operators import EPS
from ..cases.values import Shapes
from .programs import Program, bind, buffers, joined, words


def record(plan: Plan, folder: Path) -> None:
    from .record import preprocessed

    for path in sorted(folder.iterdir()):
        text = path.read_text()
        start = text.find("#include <metal_stdlib>")
        if start >= 0:
            plan.add_source("source", preprocessed(text[start:]))


def file_of(plan: Plan, kernel: str) -> str | None:
    return next(
        (file for file in plan.files("source") if re.search(rf"\bvoid {kernel}\b", plan.source(file))), None
    )


def peers(plan: Plan, case: Case) -> list[Program]:
    makers = {
        Norm: norm,
        SiluMul: silu_mul,
        WeightedSum: weighted_sum,
        Router: router,
        Gate: gate,
        Bucket: bucket,
    }
    if type(case) not in makers or getattr(case, "dtype", "f32") not in ("f32", "i32"):
        return []
    program = makers[type(case)](plan, case)
    return [program] if program else []


def launch(
    plan: Plan, kernel: str, grid: tuple, threads: int, memory: int, bindings: list
) -> Dispatch | None:
    file = file_of(plan, kernel)
    if file is None:
        return None
    lengths = {0: memory} if memory else {}
    return Dispatch(file, kernel, (*grid, 1, 1)[:3], (threads, 1, 1), bindings, threadgroup_bytes=lengths)


def program(case: Case, dispatches: list, shapes: dict, wrong=None) -> Program | None:
    """`shapes` of the results; those of ids are int32."""
    if None in dispatches:
        return None
    results = {
        name: (list(shape), "int32" if kind == "ids" else "float32") for name, (shape, kind) in shapes.items()
    }
    return Program("source", dispatches, results, wrong or case.wrong)


def norm(plan: Plan, case: Norm) -> Program | None:
    rows, width = case.rows, case.width
    names = ["residual", "input", "weight", "result0"]
    if case.operator == "fused_norm_add":
        bindings = [*buffers(*names), words(4, width), words(5, rows), words(6, EPS)]
    elif case.operator == "fused_residual_norm":
        bindings = [*buffers(*names, "result1"), words(5, width, rows, EPS, 1)]
    else:
        bindings = [*buffers(*names, "scalar"), words(5, width, rows, EPS, 0)]
    # The residual norms write `width` floats of threadgroup memory.
    dispatch = launch(plan, f"{case.operator}_f32", (rows,), 256, 4 * max(width, 256), bindings)
    results = ("result0",) if case.scaled or "add" in case.operator else ("result0", "result1")
    return program(case, [dispatch], dict.fromkeys(results, ((rows, width), "")))


def silu_mul(plan: Plan, case: SiluMul) -> Program | None:
    bindings = [*buffers("gate", "up", "result0"), words(3, case.width, case.slots)]
    dispatch = launch(plan, "silu_mul_stacked_f32", (ceil_div(case.width, 256), case.slots), 256, 0, bindings)
    return program(case, [dispatch], {"result0": ((case.slots, case.width), "")})


def weighted_sum(plan: Plan, case: WeightedSum) -> Program | None:
    row, has_norm = 4 * case.width, "norm" in case.operator
    total = "residual_" if "residual" in case.operator else "result0"
    dispatches = []
    for token in range(case.rows):
        bindings = [
            bind(0, "slots", token * case.slots * row),
            bind(1, "weights", token * case.slots * 4),
            bind(2, total, token * row),
        ]
        grid = (1,) if has_norm else (ceil_div(case.width, 256),)
        if has_norm:
            more = [
                bind(3, "norm_weight"),
                bind(4, "result0", token * row),
                words(5, case.width, case.slots, EPS),
            ]
        else:
            more = [words(3, case.width, case.slots)]
        dispatches.append(launch(plan, case.operator.rstrip("_") + "_f32", grid, 256, 0, bindings + more))
    results = {"result0": ((case.rows, case.width), "")} if has_norm or total == "result0" else {}
    return program(case, dispatches, results)


def router(plan: Plan, case: Router) -> Program | None:
    experts, top_k = case.experts, case.top_k
    if case.operator == "moe_router_topk_softmax":
        bindings = [*buffers("logits", "result1", "result0"), words(3, experts, top_k, 1)]
        memory = 4 * (experts + 2 * top_k + 1)
        dispatch = launch(plan, f"{case.operator}_f32", (case.rows,), 32, memory, bindings)
    elif case.operator == "fused_moe_routing":
        # A threadgroup of more threads than experts would overwrite its own exponentials.
        threads = min(128, 1 << (experts.bit_length() - 1))
        name = "fused_moe_routing_f32" if case.rows == 1 else "fused_moe_routing_batch_f32"
        bindings = [*buffers("logits", "result1", "result0", "per_expert_scale"), words(4, experts, top_k)]
        dispatch = launch(plan, name, (case.rows,), threads, 4 * (2 * experts + threads), bindings)
    else:
        return None
    shape = (case.rows, top_k)
    return program(case, [dispatch], {"result0": (shape, ""), "result1": (shape, "ids")})


def gate(plan: Plan, case: Gate) -> Program | None:
    parameters = (case.width, case.experts, case.top_k, EPS)
    bindings = buffers("hidden", "router_weight", "norm_weight", "per_expert_scale", "result1", "result0")
    bindings += [words(6 + i, value) for i, value in enumerate(parameters)]
    dispatch = launch(plan, "moe_gate", (case.tokens,), 128, 4 * (case.width + case.experts), bindings)
    shape = (case.tokens, case.top_k)
    return program(case, [dispatch], {"result0": (shape, ""), "result1": (shape, "ids")})


def bucket(plan: Plan, case: Bucket) -> Program | None:
    pairs, experts = case.tokens * case.top_k, case.experts
    bindings = [
        *buffers("ids", "counts", "lists", "grid0", "grid1"),
        words(5, experts, pairs, pairs, *case.ROWS),
    ]
    dispatch = launch(plan, "moe_compute_ids_tpe_f32", (1,), 256, 0, bindings)
    shapes = {"counts": ((experts,), "ids"), "lists": ((experts, pairs), "ids")}
    shapes |= {"grid0": ((3,), "ids"), "grid1": ((3,), "ids")}

    def wrong(before: dict, after: dict) -> str:
        ids = before["ids"].flatten()
        counts = torch.bincount(ids[ids >= 0], minlength=experts)
        return "" if torch.equal(after["counts"].long(), counts) else "counts differ"

    return program(case, [dispatch], shapes, wrong)


def layer(plan: Plan, case: Experts, products: list[Program]) -> list[Program]:
    """One token through MLX's two products, and between and behind them the source's silu and sum. These are
    float32, so that each has inputs of its own of the right size."""
    if case.tokens != 1 or not products or file_of(plan, "silu_mul_stacked_f32") is None:
        return []
    silu = silu_mul(plan, SiluMul(case.top_k, case.intermediate, "f32"))
    total = weighted_sum(plan, WeightedSum("weighted_sum_stacked", 1, case.top_k, case.hidden, "f32"))
    for inner, size in ((silu, case.intermediate), (total, case.hidden)):
        inner.scratch = dict.fromkeys(("gate", "up", "slots"), 4 * case.top_k * size)
    first, second = products
    shapes = Shapes("meta")
    shared = {*case.weights(shapes), *case.inputs(shapes)}
    return [joined("MLX's products, source's silu and sum", [first, silu, second, total], "", shared)]
