#!/usr/bin/env python3
"""Time the shaders of norms, routing and combine on an NVIDIA GPU, beside the source kernels.

    python scripts/bench_shaders.py --translator DIR [--sources DIR] [--check-only]

DIR of --translator holds msl_cuda.py, which compiles Metal source for CUDA (one simdgroup = one warp).
--sources names a folder of text files with the source kernels; without it only our times are printed. Every
result is checked against float64 in the same run; exit code 1 when one is wrong. What is printed is "MSL on
this GPU", never "Metal on a Mac". Each launch takes the next of several input sets, so that the L2 cache does
not serve what a model would read from memory (small inputs it may still serve, for both sides). The launches
repeat what csrc/*.mm encode.
"""

import argparse
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
SHADERS = REPOSITORY / "torch_moe_mps" / "shaders"
sys.path.insert(0, str(REPOSITORY / "tests"))
import oracles  # noqa: E402

SUFFIX = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
COLD_BYTES = 192 << 20  # more than three times the L2 of an H200
MAX_SETS = 128
EPS = 1e-6


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# Params: packed from the declarations in params.h


def struct_fields() -> dict[str, list[tuple[str, str]]]:
    text = (SHADERS / "params.h").read_text()
    structs = re.findall(r"struct (\w+) \{(.*?)\};", text, flags=re.S)
    return {
        name: re.findall(r"^\s*(uint32_t|uint64_t|int32_t|float) (\w+);", body, flags=re.M)
        for name, body in structs
    }


FIELDS = struct_fields()
FORMAT = {"uint32_t": "I", "uint64_t": "Q", "int32_t": "i", "float": "f"}


def pack(name: str, **values) -> torch.Tensor:
    fields = FIELDS[name]
    unknown = values.keys() - {field for _, field in fields}
    assert not unknown, unknown
    data = struct.pack(
        "".join(FORMAT[kind] for kind, _ in fields), *(values.get(field, 0) for _, field in fields)
    )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()


def words(*values) -> list[torch.Tensor]:
    """One buffer for each scalar argument of a source kernel."""
    return [
        torch.tensor([v], dtype=torch.float32 if isinstance(v, float) else torch.int32).cuda() for v in values
    ]


# Kernels


class Kernels:
    """The kernels of one Metal source."""

    def __init__(self, translator, source: Path | str):
        self.translator = translator
        self.library = translator.Library(str(source))

    def launcher(self, name: str, tensors: list, grid, threads: int, memory: int = 0):
        import cupy

        bits = {2: torch.int16, 4: torch.int32}
        arrays = {
            i: cupy.asarray(t.view(bits[t.element_size()]) if t.dtype == torch.bfloat16 else t)
            for i, t in enumerate(tensors)
        }
        grid = (*grid, 1, 1)[:3]
        return lambda: self.library.launch(name, arrays, grid, (threads, 1, 1), [memory] if memory else [])


class Sources:
    """The source kernels: the Metal text inside the files of a folder, found by kernel name."""

    def __init__(self, translator, folder: Path | None):
        self.translator = translator
        self.texts = []
        self.kernels = {}
        for path in sorted(folder.iterdir()) if folder else []:
            text = path.read_text()
            start = text.find("#include <metal_stdlib>")
            if start >= 0:
                self.texts.append(text[start:])

    def launcher(self, name: str, *args, **kwargs):
        text = next((t for t in self.texts if re.search(rf"kernel void {name}\b", t)), None)
        if text is None:
            return None
        if text not in self.kernels:
            self.kernels[text] = Kernels(self.translator, text)
        return self.kernels[text].launcher(name, *args, **kwargs)


@dataclass
class Case:
    operator: str
    shape: str
    traffic: int  # bytes that must be read and written
    make: object  # () -> (ours, source or None, check of ours, check of source)
    sets: int = 0

    def __post_init__(self):
        self.sets = self.sets or max(1, min(MAX_SETS, COLD_BYTES // self.traffic))


def normal(*shape, dtype=torch.float32, scale=1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def poison(*shape, dtype=torch.float32) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point else -(1 << 30)
    return torch.full(shape, value, dtype=dtype, device="cuda")


def close(actual: torch.Tensor, expected: np.ndarray) -> str:
    """Empty, or what is wrong."""
    error = np.linalg.norm(oracles.exact(actual) - expected) / max(np.linalg.norm(expected), 1e-30)
    return "" if error < TOLERANCE[actual.dtype] else f"error {error:.2e}"


def aligned(width: int) -> bool:
    return width % 4 == 0


# Norms


def row_threads(rows: int, width: int, most: int = 1024) -> int:
    return min(most, ceil_div(width, (4 if rows <= 256 else 16) * 32) * 32)


def norm_case(bench, operator: str, rows: int, width: int, dtype=torch.float32) -> Case:
    summed = operator.startswith("fused_residual")
    scaled = operator.endswith("scalar")
    arrays = 4 if operator == "fused_residual_norm" else 3
    traffic = rows * width * dtype.itemsize * arrays

    def make():
        residual, input = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype)
        weight, scalar = normal(width), normal(1)
        out, total, source_out, source_total = (poison(rows, width, dtype=dtype) for _ in range(4))
        write_sum = operator == "fused_residual_norm"
        short = width <= 512 and rows > 1
        threads = 32 * min(rows, 8) if short else row_threads(rows, width)
        params = pack(
            "NormParams",
            rows=rows,
            width=width,
            simdgroups_per_row=1 if short else threads // 32,
            vectorised=aligned(width),
            scalar_kind=int(scaled),
            write_sum=write_sum,
            eps=EPS,
        )
        ours = bench.norms.launcher(
            f"{'residual_norm' if summed else 'norm_add'}_{SUFFIX[dtype]}",
            [residual, input, weight, scalar, out, total, params],
            (ceil_div(rows, min(rows, 8)) if short else rows,),
            threads,
        )
        source = None
        if dtype == torch.float32:
            buffers = [residual, input, weight, source_out]
            if operator == "fused_norm_add":
                buffers += words(width, rows, EPS)
            elif write_sum:
                buffers += [
                    source_total,
                    torch.cat([t.view(torch.int32) for t in words(width, rows, EPS, 1)]),
                ]
            else:
                buffers += [scalar, torch.cat([t.view(torch.int32) for t in words(width, rows, EPS, 0)])]
            # The source's residual norms write `width` floats of threadgroup memory.
            source = bench.sources.launcher(f"{operator}_f32", buffers, (rows,), 256, 4 * max(width, 256))

        def check(result, sum_result):
            r, x, w = (oracles.exact(t) for t in (residual, input, weight))
            scale = oracles.exact(scalar) if scaled else 1.0
            if not summed:
                return close(result, oracles.norm_add(r, x, w, EPS, scale))
            s = oracles.round_to(r + x, dtype)
            wrong = close(result, oracles.residual_norm(s, w, EPS, scale))
            return wrong or (close(sum_result, s) if write_sum else "")

        return ours, source, lambda: check(out, total), lambda: check(source_out, source_total)

    return Case(operator, f"T {rows} H {width} {SUFFIX[dtype]}", traffic, make)


# Combine


def silu_case(bench, slots: int, width: int, dtype=torch.float32) -> Case:
    def make():
        gate, up = normal(slots, width, dtype=dtype), normal(slots, width, dtype=dtype)
        out, source_out = poison(slots, width, dtype=dtype), poison(slots, width, dtype=dtype)
        params = pack("SiluMulParams", count=slots * width, vectorised=1)
        ours = bench.combine.launcher(
            f"silu_mul_stacked_{SUFFIX[dtype]}",
            [gate, up, out, params],
            (ceil_div(slots * width, 512),),
            128,
        )
        source = None
        if dtype == torch.float32:
            buffers = [gate, up, source_out, torch.cat(words(width, slots))]
            source = bench.sources.launcher(
                "silu_mul_stacked_f32", buffers, (ceil_div(width, 256), slots), 256
            )
        expected = oracles.silu_mul(oracles.exact(gate), oracles.exact(up))
        return ours, source, lambda: close(out, expected), lambda: close(source_out, expected)

    return Case(
        "silu_mul_stacked", f"S {slots} I {width} {SUFFIX[dtype]}", 3 * slots * width * dtype.itemsize, make
    )


def together(launches: list):
    """The source kernels serve one token: several launches make up one call."""
    if any(launch is None for launch in launches):
        return None

    def run():
        for launch in launches:
            launch()

    return run


def weighted_sum_case(bench, operator: str, rows: int, slots: int, width: int, dtype=torch.float32) -> Case:
    """weighted_sum_stacked, weighted_sum_residual_stacked_ and moe_weighted_reduce: one kernel."""
    has_residual = operator != "weighted_sum_stacked"
    has_shared = operator == "moe_weighted_reduce"
    traffic = rows * width * dtype.itemsize * (slots + 1 + has_residual + has_shared)

    def make():
        x, w = normal(rows, slots, width, dtype=dtype), normal(rows, slots)
        shared, gate, residual = (
            normal(rows, width, dtype=dtype),
            normal(rows),
            normal(rows, width, dtype=dtype),
        )
        in_place = operator == "weighted_sum_residual_stacked_"
        source_out = residual.clone() if in_place else poison(rows, width, dtype=dtype)
        before = oracles.exact(residual)
        out = residual if in_place else poison(rows, width, dtype=dtype)
        params = pack(
            "WeightedSumParams",
            rows=rows,
            slots=slots,
            width=width,
            vectorised=aligned(width),
            has_shared=has_shared,
            has_gate=has_shared,
            gate_is_logit=has_shared,
            has_residual=has_residual,
        )
        items = ceil_div(width, 4 if aligned(width) else 1)
        threads = min(32 if rows * width <= 16384 else 128, ceil_div(items, 32) * 32)
        ours = bench.combine.launcher(
            f"weighted_sum_{SUFFIX[dtype]}",
            [x, w, gate, shared, residual, out, params],
            (ceil_div(items, threads), rows),
            threads,
        )
        source = None
        if dtype == torch.float32 and not has_shared:
            shape = torch.cat(words(width, slots))
            name = operator.rstrip("_") + "_f32"
            source = together(
                [
                    bench.sources.launcher(
                        name, [x[t], w[t], source_out[t], shape], (ceil_div(width, 256),), 256
                    )
                    for t in range(rows)
                ]
            )
        expected = oracles.weighted_reduce(
            oracles.exact(w),
            oracles.exact(x),
            oracles.exact(gate),
            oracles.exact(shared) if has_shared else None,
            before if has_residual else None,
            gate_is_logit=True,
        )
        return ours, source, lambda: close(out, expected), lambda: close(source_out, expected)

    return Case(operator, f"T {rows} K {slots} H {width} {SUFFIX[dtype]}", traffic, make)


def weighted_sum_norm_case(bench, rows: int, slots: int, width: int, dtype=torch.float32) -> Case:
    operator = "weighted_sum_residual_norm_stacked_"

    def make():
        x, w, norm = normal(rows, slots, width, dtype=dtype), normal(rows, slots), normal(width)
        residual = normal(rows, width, dtype=dtype)
        source_residual = residual.clone()
        out, source_out = poison(rows, width, dtype=dtype), poison(rows, width, dtype=dtype)
        s = oracles.weighted_sum(oracles.exact(x), oracles.exact(w)) + oracles.exact(residual)
        params = pack("WeightedSumNormParams", slots=slots, width=width, vectorised=aligned(width), eps=EPS)
        ours = bench.combine.launcher(
            f"weighted_sum_norm_{SUFFIX[dtype]}",
            [residual, x, w, norm, out, params],
            (rows,),
            row_threads(rows, width, 512),
        )
        source = None
        if dtype == torch.float32:
            shape = torch.cat([t.view(torch.int32) for t in words(width, slots, EPS)])
            source = together(
                [
                    bench.sources.launcher(
                        operator.rstrip("_") + "_f32",
                        [x[t], w[t], source_residual[t], norm, source_out[t], shape],
                        (1,),
                        256,
                    )
                    for t in range(rows)
                ]
            )
        s = oracles.round_to(s, dtype)
        expected = oracles.residual_norm(s, oracles.exact(norm), EPS)

        def check(carried, result):
            return close(carried, s) or close(result, expected)

        return ours, source, lambda: check(residual, out), lambda: check(source_residual, source_out)

    traffic = rows * width * dtype.itemsize * (slots + 3)
    return Case(operator, f"T {rows} K {slots} H {width} {SUFFIX[dtype]}", traffic, make)


# Routing


def router_params(rows: int, experts: int, top_k: int, **values) -> torch.Tensor:
    defaults = {"groups": 1, "top_groups": 1, "scaling_factor": 1.0, "norm_min": -3e38}
    return pack(
        "RouterParams",
        rows=rows,
        experts=experts,
        top_k=top_k,
        vectorised=aligned(experts),
        **(defaults | values),
    )


def launch_router(bench, tensors: list, rows: int, experts: int, dtype):
    per_lane = next(n for n in (2, 4, 8, 16, 32) if n * 32 >= experts)
    per_group = 1 if rows < 256 else 4
    return bench.routing.launcher(
        f"route_{SUFFIX[dtype]}_{per_lane}", tensors, (ceil_div(rows, per_group),), 32 * per_group
    )


def router_case(
    bench, operator: str, rows: int, experts: int, top_k: int, dtype=torch.float32, **options
) -> Case:
    """moe_router_topk_softmax, fused_moe_routing, and moe_router with a bias and groups."""
    codes = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "softmax_after_topk": 3}

    def make():
        logits, scale, bias = (
            normal(rows, experts, dtype=dtype, scale=2.0),
            normal(experts),
            normal(experts, scale=0.1),
        )
        outputs = [(poison(rows, top_k), poison(rows, top_k, dtype=torch.int32)) for _ in range(2)]
        (weights, ids), (source_weights, source_ids) = outputs
        if operator == "moe_router_topk_softmax":
            wanted = {"scoring": "softmax", "norm_topk_prob": True, "norm_eps": 0.0, "norm_min": 2.0**-14}
            params = router_params(rows, experts, top_k, normalise=1, norm_min=2.0**-14)
        elif operator == "fused_moe_routing":
            wanted = {
                "scoring": "softmax_after_topk",
                "norm_topk_prob": False,
                "per_expert_scale": oracles.exact(scale),
            }
            params = router_params(rows, experts, top_k, scoring=3, has_scale=1)
        else:
            wanted = {"norm_topk_prob": True, "scaling_factor": 2.5, "bias": oracles.exact(bias), **options}
            params = router_params(
                rows,
                experts,
                top_k,
                scoring=codes[options["scoring"]],
                has_bias=1,
                normalise=1,
                norm_eps=1e-20,
                scaling_factor=2.5,
                groups=options["num_groups"],
                top_groups=options["top_groups"],
                group_score_is_max=int(options["group_score"] == "max"),
            )
        ours = launch_router(bench, [logits, bias, scale, weights, ids, params], rows, experts, dtype)
        source = None
        if dtype == torch.float32 and operator == "moe_router_topk_softmax" and top_k <= 32:
            source = bench.sources.launcher(
                f"{operator}_f32",
                [logits, source_ids, source_weights, torch.cat(words(experts, top_k, 1))],
                (rows,),
                32,
                4 * (experts + 2 * top_k + 1),
            )
        if dtype == torch.float32 and operator == "fused_moe_routing":
            # A threadgroup larger than the number of experts makes the source overwrite its own exponentials.
            threads = min(128, 1 << (experts.bit_length() - 1))
            name = f"{operator}_f32" if rows == 1 else f"{operator}_batch_f32"
            buffers = [logits, source_ids, source_weights, scale, torch.cat(words(experts, top_k))]
            source = bench.sources.launcher(name, buffers, (rows,), threads, 4 * (2 * experts + threads))

        def check(w, i):
            expected, wanted_ids, gaps = oracles.route(oracles.exact(logits), top_k, **wanted)
            clear = gaps > 1e-5
            if not np.array_equal(i.cpu().numpy()[clear], wanted_ids[clear]):
                return "ids differ"
            return close(w[torch.from_numpy(clear).cuda()], expected[clear])

        return ours, source, lambda: check(weights, ids), lambda: check(source_weights, source_ids)

    traffic = rows * (experts * dtype.itemsize + top_k * 8)
    name = f"{operator} {options['scoring']} {options['group_score']}" if options else operator
    return Case(name, f"T {rows} E {experts} K {top_k} {SUFFIX[dtype]}", traffic, make)


def gate_layout(tokens: int, experts: int, width: int) -> tuple[int, int, int]:
    """(tokens of a threadgroup, threads, columns of a tile), as in csrc/routing.mm."""

    def fits(n):
        return (8192 - 128) // n - experts

    layout = (1, 1024, fits(1))
    if tokens > 64:
        layout = (4, 512, min(fits(4), 1024))
    if tokens >= 1024 and fits(16) >= 128:
        layout = (16, 512, min(fits(16), 256))
    return layout[0], layout[1], min(layout[2], ceil_div(width, 128) * 128) // 128 * 128


def gate_case(bench, tokens: int, experts: int, width: int, top_k: int, weight_dtype=torch.float32) -> Case:
    def make():
        hidden, router = (
            normal(tokens, width, dtype=torch.bfloat16),
            normal(experts, width, dtype=weight_dtype, scale=0.05),
        )
        norm, scale = normal(width), normal(experts).abs() + 0.5
        weights, source_weights = poison(tokens, top_k), poison(tokens, top_k)
        ids, source_ids = poison(tokens, top_k, dtype=torch.int32), poison(tokens, top_k, dtype=torch.int32)
        per_group, threads, tile = gate_layout(tokens, experts, width)
        params = pack(
            "GateParams",
            tokens=tokens,
            experts=experts,
            width=width,
            top_k=top_k,
            tile_width=tile,
            vectorised=aligned(width),
            hidden_dtype=2,
            renormalise=1,
            eps=EPS,
        )
        ours = bench.routing.launcher(
            f"gate_{SUFFIX[weight_dtype]}_{per_group}",
            [hidden, router, norm, scale, weights, ids, params],
            (ceil_div(tokens, per_group),),
            threads,
            4 * per_group * (tile + experts),
        )
        source = None
        if weight_dtype == torch.float32:
            buffers = [
                hidden,
                router,
                norm,
                scale,
                source_ids,
                source_weights,
                *words(width, experts, top_k, EPS),
            ]
            source = bench.sources.launcher("moe_gate", buffers, (tokens,), 128, 4 * (width + experts))

        def check(w, i):
            logits = oracles.gate_logits(*(oracles.exact(t) for t in (hidden, router, norm)), EPS)
            chosen = i.cpu().numpy().astype(np.int64)
            if (
                chosen.min() < 0
                or chosen.max() >= experts
                or any(len(set(row)) < top_k for row in chosen.tolist())
            ):
                return "ids not distinct or out of range"
            best = -np.sort(-logits, axis=-1)[:, :top_k]
            error = np.abs(np.take_along_axis(logits, chosen, -1) - best).max() / np.abs(best).max()
            if error > 1e-5:  # float32 sums may swap experts that are as near as this
                return f"logits of the chosen {error:.1e} off"
            expected = oracles.gate_weights(logits, chosen, oracles.exact(scale), True)
            wrong = np.linalg.norm(oracles.exact(w) - expected) / np.linalg.norm(expected)
            return "" if wrong < 2e-5 else f"error {wrong:.1e}"

        return ours, source, lambda: check(weights, ids), lambda: check(source_weights, source_ids)

    traffic = experts * width * weight_dtype.itemsize + tokens * width * 2
    return Case(
        "moe_gate", f"T {tokens} E {experts} H {width} K {top_k} {SUFFIX[weight_dtype]}", traffic, make
    )


def skewed_ids(tokens: int, experts: int, top_k: int, dtype) -> torch.Tensor:
    popularity = torch.rand(tokens, experts, device="cuda") * torch.linspace(1.0, 1.5, experts, device="cuda")
    return popularity.topk(top_k).indices.to(dtype)


def ids_tpe_source(bench, ids: torch.Tensor, experts: int, rows: tuple[int, int]):
    pairs = ids.numel()
    outputs = [poison(experts, dtype=torch.int32), poison(experts, pairs, dtype=torch.int32)]
    outputs += [poison(3, dtype=torch.int32), poison(3, dtype=torch.int32)]
    shape = torch.cat(words(experts, pairs, pairs, *rows))
    return bench.sources.launcher("moe_compute_ids_tpe_f32", [ids, *outputs, shape], (1,), 256), outputs[0]


def bucket_case(bench, tokens: int, experts: int, top_k: int, dtype=torch.int32, tile_rows: int = 0) -> Case:
    pairs = tokens * top_k

    def make():
        ids = skewed_ids(tokens, experts, top_k, dtype)
        ids[:: max(2, tokens // 2), 0] = -1
        order, offsets = poison(pairs, dtype=torch.int32), poison(experts + 1, dtype=torch.int32)
        tiles = poison(min(pairs, experts + 1) + pairs // max(tile_rows, 1), 4, dtype=torch.int32)
        grids = poison(6, dtype=torch.int32)
        buckets, lane_sets = experts + 1, 64
        groups = max(1, min(16, ceil_div(pairs, 2048)))
        run = ceil_div(pairs, groups)
        chunks = max(1, min(32, (8192 - 128 - 2 * buckets) // (buckets + lane_sets), ceil_div(run, 64)))
        simdgroups = max(chunks, min(32, ceil_div(buckets, 32)))
        params = pack(
            "BucketParams",
            pairs=pairs,
            experts=experts,
            chunks=chunks,
            chunk=ceil_div(ceil_div(run, chunks), 32) * 32,
            upper_digits=(experts // lane_sets).bit_length(),
            tile_rows=tile_rows,
            columns_a=3,
            columns_b=4,
        )
        ours = bench.routing.launcher(
            f"bucket_pairs_{SUFFIX[dtype]}",
            [ids, order, offsets, tiles, grids, params],
            (groups,),
            32 * simdgroups,
            4 * (2 * buckets + chunks * (buckets + lane_sets)),
        )
        source, source_tpe = None, None
        if dtype == torch.int32:
            source, source_tpe = ids_tpe_source(bench, ids, experts, (768, 2048))
        lists, rest = oracles.pairs_of_experts(ids.cpu().numpy(), experts)
        counts = [len(pairs_of_expert) for pairs_of_expert in lists]

        def check():
            if order.tolist() != [p for run in (*lists, rest) for p in run]:
                return "order differs"
            if offsets.tolist() != [0, *np.cumsum(counts).tolist()]:
                return "offsets differ"
            if tile_rows == 0:
                return ""
            starts = np.concatenate([[0], np.cumsum(counts)])
            expected = [
                [e, starts[e] + i, min(tile_rows, n - i), 0]
                for e, n in enumerate(counts)
                for i in range(0, n, tile_rows)
            ]
            if tiles[: len(expected)].tolist() != expected or grids.tolist() != [
                3,
                len(expected),
                1,
                4,
                len(expected),
                1,
            ]:
                return "tiles differ"
            return ""

        def check_source():
            return "" if source_tpe.tolist() == counts else "tpe differs"

        return ours, source, check, check_source

    name = "moe_bucket" + (f", tiles of {tile_rows}" if tile_rows else "")
    return Case(name, f"T {tokens} E {experts} K {top_k} {SUFFIX[dtype]}", pairs * (dtype.itemsize + 4), make)


def ids_tpe_case(bench, tokens: int, experts: int, top_k: int, dtype=torch.int32) -> Case:
    pairs = tokens * top_k

    def make():
        ids = skewed_ids(tokens, experts, top_k, dtype)
        tpe, lists = poison(experts, dtype=torch.int32), poison(experts, pairs, dtype=torch.int32)
        grids = [poison(3, dtype=torch.int32) for _ in range(2)]
        params = pack("IdsTpeParams", pairs=pairs, experts=experts, gate_up_tiles=12, down_tiles=32)
        threads = min(1024, ceil_div(pairs, 32) * 32)
        ours = bench.routing.launcher(
            f"ids_by_expert_{SUFFIX[dtype]}",
            [ids, tpe, lists, *grids, params],
            (experts + 1,),
            threads,
            4 * (experts + 1),
        )
        source, source_tpe = None, None
        if dtype == torch.int32:
            source, source_tpe = ids_tpe_source(bench, ids, experts, (768, 2048))
        expected, _ = oracles.pairs_of_experts(ids.cpu().numpy(), experts)
        counts = [len(pairs_of_expert) for pairs_of_expert in expected]

        def check():
            if tpe.tolist() != counts:
                return "tpe differs"
            if lists.tolist() != [run + [-1] * (pairs - len(run)) for run in expected]:
                return "lists differ"
            most = max(1, ceil_div(max(counts), 32))
            return (
                ""
                if [g.tolist() for g in grids] == [[most, 12, experts], [most, 32, experts]]
                else "grids differ"
            )

        return ours, source, check, lambda: "" if source_tpe.tolist() == counts else "tpe differs"

    shape = f"T {tokens} E {experts} K {top_k} {SUFFIX[dtype]}"
    return Case("moe_compute_ids_tpe", shape, pairs * dtype.itemsize + experts * pairs * 4, make)


# The run


class Bench:
    def __init__(self, translator, sources: Path | None):
        self.translator = translator
        self.norms = Kernels(translator, SHADERS / "norms.metal")
        self.combine = Kernels(translator, SHADERS / "combine.metal")
        self.routing = Kernels(translator, SHADERS / "routing.metal")
        self.sources = Sources(translator, sources)

    def timed_cases(self) -> list[Case]:
        cases = [gate_case(self, t, 128, 2816, 8) for t in (1, 32, 512, 4096)]
        cases += [gate_case(self, t, 256, 2048, 8, torch.bfloat16) for t in (1, 4096)]
        cases += [router_case(self, "moe_router_topk_softmax", t, 128, 8) for t in (1, 32, 512, 4096)]
        cases += [router_case(self, "fused_moe_routing", t, 128, 8) for t in (1, 32, 512, 4096)]
        cases += [
            router_case(
                self,
                "moe_router",
                t,
                256,
                8,
                scoring="sigmoid",
                num_groups=8,
                top_groups=4,
                group_score="top2_sum",
            )
            for t in (1, 4096)
        ]
        cases += [ids_tpe_case(self, t, 128, 8) for t in (1, 32, 512, 4096)]
        cases += [bucket_case(self, t, 128, 8) for t in (1, 32, 512, 4096)]
        cases += [
            bucket_case(self, 4096, 128, 8, tile_rows=32),
            bucket_case(self, 4096, 512, 10),
            bucket_case(self, 32768, 128, 8),
        ]
        for width in (2048, 4096):
            cases += [weighted_sum_norm_case(self, t, 8, width) for t in (1, 32)]
        for operator in ("weighted_sum_stacked", "weighted_sum_residual_stacked_"):
            cases += [weighted_sum_case(self, operator, t, 8, 2048) for t in (1, 32)]
        cases += [
            weighted_sum_case(self, "moe_weighted_reduce", t, 8, 2048, torch.bfloat16) for t in (1, 32, 4096)
        ]
        cases += [silu_case(self, s, 768) for s in (8, 256, 4096)]
        for operator in (
            "fused_norm_add",
            "fused_norm_add_scalar",
            "fused_residual_norm",
            "fused_residual_norm_scalar",
        ):
            cases += [norm_case(self, operator, t, 2048) for t in (1, 32, 512, 8192)]
        cases += [
            norm_case(self, "fused_norm_add", 8192, width, torch.bfloat16) for width in (128, 2048, 4096)
        ]
        return cases

    def checked_cases(self) -> list[Case]:
        """One of every kernel and path, small: for compute-sanitizer."""
        cases = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, width in ((1, 2048), (5, 300), (3, 1031), (2, 20000), (300, 2048)):
                cases += [
                    norm_case(self, o, rows, width, dtype)
                    for o in ("fused_norm_add_scalar", "fused_residual_norm")
                ]
                cases += [weighted_sum_norm_case(self, rows, 5, width, dtype)]
                cases += [weighted_sum_case(self, "moe_weighted_reduce", rows, 9, width, dtype)]
            cases += [silu_case(self, 3, 333, dtype)]
            for experts in (8, 60, 128, 256, 500, 1024):
                cases += [router_case(self, "moe_router_topk_softmax", 5, experts, min(experts, 40), dtype)]
            cases += [
                router_case(
                    self,
                    "moe_router",
                    300,
                    256,
                    8,
                    dtype,
                    scoring=scoring,
                    num_groups=8,
                    top_groups=4,
                    group_score=kind,
                )
                for scoring, kind in (("sigmoid", "top2_sum"), ("sqrtsoftplus", "max"))
            ]
            for tokens, experts, width in ((1, 128, 2816), (3, 60, 77), (70, 300, 1500), (1030, 128, 520)):
                cases += [gate_case(self, tokens, experts, width, 8, dtype)]
        for dtype in (torch.int32, torch.int64):
            for tokens, experts, top_k in ((1, 8, 2), (33, 60, 4), (700, 128, 8), (900, 1024, 10)):
                cases += [bucket_case(self, tokens, experts, top_k, dtype, tile_rows=32)]
                cases += [ids_tpe_case(self, tokens, experts, top_k, dtype)]
        return cases

    def check(self, case: Case) -> str:
        ours, source, check_ours, check_source = case.make()
        ours()
        torch.cuda.synchronize()
        wrong = check_ours()
        if wrong:
            return wrong
        if source:
            source()
            torch.cuda.synchronize()
            return f"SOURCE {check_source()}" if check_source() else ""
        return ""

    def times(self, case: Case) -> tuple[float, float | None]:
        made = [case.make()[:2] for _ in range(case.sets)]
        return self.time_rotating([m[0] for m in made]), self.time_rotating([m[1] for m in made])

    def time_rotating(self, launches: list) -> float | None:
        """Median microseconds of one launch; each launch takes the next input set."""
        if launches[0] is None:
            return None
        count = len(launches) * ceil_div(20, len(launches))
        turns = iter(launches * (ceil_div(count, len(launches)) + 1))
        return self.translator.bench(lambda: next(turns)(), n=count, repeat=7)


def copy_ceiling() -> float:
    """GB/s of a device-to-device copy, counting bytes read and written."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.numel() / sorted(times)[3] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--translator", type=Path, required=True, help="folder of msl_cuda.py")
    parser.add_argument("--sources", type=Path, help="folder of text files with the source kernels")
    parser.add_argument(
        "--check-only", action="store_true", help="run every kernel once on small shapes, without timing"
    )
    parser.add_argument("--only", default="", help="regular expression: the operators to run")
    options = parser.parse_args()
    sys.path.insert(0, str(options.translator.resolve()))
    import msl_cuda

    torch.manual_seed(0)
    bench = Bench(msl_cuda, options.sources)
    cases = bench.checked_cases() if options.check_only else bench.timed_cases()
    cases = [case for case in cases if re.search(options.only, case.operator)]
    print(f"{torch.cuda.get_device_name()}, copy {copy_ceiling():.0f} GB/s")
    print(f"{'operator':36} {'shape':30} {'ours us':>9} {'source us':>9} {'ratio':>6} {'GB/s':>6}  check")
    failures = 0
    for case in cases:
        wrong = bench.check(case)
        failures += bool(wrong) and not wrong.startswith("SOURCE")
        columns = ""
        if not options.check_only:
            ours, source = bench.times(case)
            columns = f"{ours:9.1f} " + (
                f"{source:9.1f} {source / ours:6.2f} " if source else f"{'-':>9} {'-':>6} "
            )
            columns += f"{case.traffic / ours / 1e3:6.0f}"
        print(f"{case.operator:36} {case.shape:30} {columns}  {wrong or 'ok'}", flush=True)
    print(f"{len(cases)} cases, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
