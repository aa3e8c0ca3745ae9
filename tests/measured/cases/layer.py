"""The cases of norms, combine and routing, checked against the tests' oracles."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from support import oracles
from support.oracles import exact

from .experts import Case, ops
from .formats import DTYPES

EPS = 1e-6
# The norm of the difference, relative to the norm of the result, of one rounding to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def differs(actual: torch.Tensor, expected: np.ndarray) -> str:
    """Empty, or how far `actual` is from `expected`."""
    return differs_by(actual, expected, TOLERANCE[actual.dtype])


@dataclass
class Norm(Case):
    group: ClassVar[str] = "norms"
    operator: str
    rows: int
    width: int
    dtype: str

    @property
    def scaled(self) -> bool:
        return self.operator.endswith("scalar")

    def inputs(self, values):
        dtype = DTYPES[self.dtype]
        scalar = {"scalar": values.normal(1, offset=2.0)} if self.scaled else {}
        return {
            "residual": values.normal(self.rows, self.width, dtype=dtype),
            "input": values.normal(self.rows, self.width, dtype=dtype),
            "weight": values.normal(self.width),
            **scalar,
        }

    def call(self, t):
        return getattr(ops(), self.operator)(*t.values(), EPS)

    def wrong(self, before, after):
        residual, x, weight = (exact(before[name]) for name in ("residual", "input", "weight"))
        scalar = exact(before["scalar"]) if self.scaled else 1.0
        if "norm_add" in self.operator:
            return differs(after["result0"], oracles.norm_add(residual, x, weight, EPS, scalar))
        total = oracles.round_to(residual + x, DTYPES[self.dtype])
        wrong = differs(after["result0"], oracles.residual_norm(total, weight, EPS, scalar))
        return wrong or ("" if self.scaled else differs(after["result1"], total))

    def bytes_moved(self, t, part=""):
        return t["residual"].nbytes * (4 if self.operator == "fused_residual_norm" else 3)


@dataclass
class LayerNorm(Case):
    group: ClassVar[str] = "norms"
    operator: ClassVar[str] = "layer_norm"
    rows: int
    width: int
    dtype: str

    def inputs(self, values):
        weights = {name: values.normal(self.width) for name in ("weight", "bias")}
        return {"input": values.normal(self.rows, self.width, dtype=DTYPES[self.dtype]), **weights}

    def call(self, t):
        return ops().layer_norm(*t.values(), EPS)

    def wrong(self, before, after):
        x, weight, bias = (exact(tensor) for tensor in before.values())
        x = oracles.rms(x - x.mean(-1, keepdims=True), EPS)
        return differs(after["result0"], x * weight + bias)

    def bytes_moved(self, t, part=""):
        return 2 * t["input"].nbytes


@dataclass
class SiluMul(Case):
    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "silu_mul_stacked"
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        shape, dtype = (self.slots, self.width), DTYPES[self.dtype]
        return {"gate": values.normal(*shape, dtype=dtype), "up": values.normal(*shape, dtype=dtype)}

    def call(self, t):
        return ops().silu_mul_stacked(t["gate"], t["up"])

    def wrong(self, before, after):
        return differs(after["result0"], oracles.silu_mul(exact(before["gate"]), exact(before["up"])))

    def bytes_moved(self, t, part=""):
        return super().bytes_moved(t) * 3 // 2


@dataclass
class WeightedSum(Case):
    """weighted_sum_stacked, weighted_sum_residual_stacked_, weighted_sum_residual_norm_stacked_."""

    group: ClassVar[str] = "combine"
    mutated: ClassVar[tuple[str, ...]] = ("residual",)
    operator: str
    rows: int
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        dtype = DTYPES[self.dtype]
        t = {
            "slots": values.normal(self.rows, self.slots, self.width, dtype=dtype),
            "routing": values.normal(self.rows, self.slots),
        }
        if "residual" in self.operator:
            t = {"residual": values.normal(self.rows, self.width, dtype=dtype), **t}
        if "norm" in self.operator:
            t["norm"] = values.normal(self.width)
        return t

    def call(self, t):
        eps = (EPS,) if "norm" in t else ()
        return getattr(ops(), self.operator)(*t.values(), *eps)

    def wrong(self, before, after):
        total = oracles.weighted_sum(exact(before["slots"]), exact(before["routing"]))
        if "residual" not in before:
            return differs(after["result0"], total)
        total = total + exact(before["residual"])
        wrong = differs(after["residual"], total)
        if wrong or "norm" not in before:
            return wrong
        carried = oracles.round_to(total, DTYPES[self.dtype])
        return differs(after["result0"], oracles.residual_norm(carried, exact(before["norm"]), EPS))

    def bytes_moved(self, t, part=""):
        row = self.rows * self.width * DTYPES[self.dtype].itemsize
        return t["slots"].nbytes + row * (1 + ("residual" in t) + ("norm" in t))


@dataclass
class WeightedReduce(Case):
    """moe_weighted_reduce with a shared expert and a residual."""

    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "moe_weighted_reduce"
    rows: int
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        dtype, row = DTYPES[self.dtype], (self.rows, self.width)
        return {
            "routing": values.normal(self.rows, self.slots),
            "slots": values.normal(self.rows, self.slots, self.width, dtype=dtype),
            "gate": values.normal(self.rows),
            "shared": values.normal(*row, dtype=dtype),
            "residual": values.normal(*row, dtype=dtype),
        }

    def call(self, t):
        return ops().moe_weighted_reduce(*t.values(), gate_is_logit=True)

    def wrong(self, before, after):
        expected = oracles.weighted_reduce(*(exact(t) for t in before.values()), gate_is_logit=True)
        return differs(after["result0"], expected)

    def bytes_moved(self, t, part=""):
        return t["slots"].nbytes + 3 * t["shared"].nbytes


@dataclass
class Router(Case):
    """moe_router_topk_softmax, fused_moe_routing, and moe_router with sigmoid, bias and groups."""

    group: ClassVar[str] = "routing"
    operator: str
    rows: int
    experts: int
    top_k: int
    dtype: str

    GROUPED: ClassVar[dict] = {
        "scoring": "sigmoid",
        "num_groups": 8,
        "top_groups": 4,
        "group_score": "top2_sum",
        "norm_topk_prob": True,
        "scaling_factor": 2.5,
    }

    def inputs(self, values):
        t = {"logits": values.normal(self.rows, self.experts, dtype=DTYPES[self.dtype], scale=2.0)}
        if self.operator == "fused_moe_routing":
            t["scale"] = values.normal(self.experts)
        if self.operator == "moe_router":
            t["bias"] = values.normal(self.experts, scale=0.1)
        return t

    def call(self, t):
        if self.operator == "moe_router_topk_softmax":
            return ops().moe_router_topk_softmax(t["logits"], self.top_k, True)
        if self.operator == "fused_moe_routing":
            return ops().fused_moe_routing(t["logits"], t["scale"], self.top_k)
        return ops().moe_router(t["logits"], self.top_k, bias=t["bias"], **self.GROUPED)

    def expected(self, t):
        logits = exact(t["logits"])
        if self.operator == "moe_router_topk_softmax":
            options = {"scoring": "softmax", "norm_topk_prob": True, "norm_eps": 0.0, "norm_min": 2.0**-14}
        elif self.operator == "fused_moe_routing":
            options = {"scoring": "softmax_after_topk", "norm_topk_prob": False}
            options["per_expert_scale"] = exact(t["scale"])
        else:
            options = self.GROUPED | {"bias": exact(t["bias"])}
        return oracles.route(logits, self.top_k, **options)

    def wrong(self, before, after):
        weights, ids, gaps = self.expected(before)
        clear = gaps > 1e-5  # others have no one right answer in float32
        if not np.array_equal(after["result1"].cpu().numpy()[clear], ids[clear]):
            return "ids differ"
        return differs(after["result0"][torch.from_numpy(clear).to(after["result0"].device)], weights[clear])

    def bytes_moved(self, t, part=""):
        return t["logits"].nbytes + self.rows * self.top_k * 8


@dataclass
class Gate(Case):
    group: ClassVar[str] = "routing"
    operator: ClassVar[str] = "moe_gate"
    tokens: int
    experts: int
    width: int
    top_k: int
    dtype: str  # of the router's weight; hidden is bfloat16

    def inputs(self, values):
        return {
            "hidden": values.normal(self.tokens, self.width, dtype=torch.bfloat16),
            "router": values.normal(self.experts, self.width, dtype=DTYPES[self.dtype], scale=0.05),
            "norm": values.normal(self.width),
            "scale": values.uniform(self.experts, low=0.5, high=1.5),
        }

    def call(self, t):
        return ops().moe_gate(*t.values(), self.top_k, EPS)

    def wrong(self, before, after):
        hidden, router, norm, scale = (exact(t) for t in before.values())
        logits = oracles.gate_logits(hidden, router, norm, EPS)
        ids = after["result1"].cpu().numpy().astype(np.int64)
        if (
            ids.min() < 0
            or ids.max() >= self.experts
            or any(len(set(row)) < self.top_k for row in ids.tolist())
        ):
            return "ids out of range or twice"
        best = -np.sort(-logits, axis=-1)[:, : self.top_k]
        error = np.abs(np.take_along_axis(logits, ids, -1) - best).max() / np.abs(best).max()
        if error > 1e-5:  # sums in float32 may swap experts that are as near as this
            return f"logits of the chosen {error:.1e} off"
        return differs_by(after["result0"], oracles.gate_weights(logits, ids, scale, True), 2e-5)


def differs_by(actual: torch.Tensor, expected: np.ndarray, tolerance: float) -> str:
    error = np.linalg.norm(exact(actual) - expected) / max(np.linalg.norm(expected), 1e-30)
    return "" if error < tolerance else f"error {error:.1e}"


@dataclass
class Bucket(Case):
    """moe_bucket and moe_compute_ids_tpe."""

    group: ClassVar[str] = "routing"
    operator: str
    tokens: int
    experts: int
    top_k: int
    dtype: str

    ROWS: ClassVar[tuple[int, int]] = (768, 2048)  # of the matrices whose grids moe_compute_ids_tpe gives

    def inputs(self, values):
        dtype = {"i32": torch.int32, "i64": torch.int64}[self.dtype]
        return {"ids": values.skewed_ids(self.tokens, self.top_k, self.experts, dtype)}

    def call(self, t):
        rows = self.ROWS if self.operator == "moe_compute_ids_tpe" else ()
        return getattr(ops(), self.operator)(t["ids"], self.experts, *rows)

    def wrong(self, before, after):
        lists, rest = oracles.pairs_of_experts(before["ids"].cpu().numpy(), self.experts)
        counts = [len(pairs) for pairs in lists]
        if self.operator == "moe_bucket":
            if after["result0"].tolist() != [p for pairs in (*lists, rest) for p in pairs]:
                return "order differs"
            return "" if after["result1"].tolist() == [0, *np.cumsum(counts).tolist()] else "offsets differ"
        if after["result0"].tolist() != counts:
            return "counts differ"
        pairs = before["ids"].numel()
        padded = np.full((self.experts, pairs), -1)
        for e, run in enumerate(lists):
            padded[e, : len(run)] = run
        if not np.array_equal(after["result1"].cpu().numpy(), padded):
            return "lists differ"
        tiles = max(1, -(-max(counts) // 32))
        grids = [[tiles, -(-rows // 64), self.experts] for rows in self.ROWS]
        return "" if [after[f"result{i}"].tolist() for i in (2, 3)] == grids else "grids differ"

    def bytes_moved(self, t, part=""):
        written = self.experts if self.operator == "moe_compute_ids_tpe" else 1
        return t["ids"].nbytes + 4 * t["ids"].numel() * written


def layer_cases() -> list[Case]:
    cases: list[Case] = [Gate(t, 128, 2816, 8, "f32") for t in (1, 32, 512, 4096)]
    cases += [Gate(t, 256, 2048, 8, "bf16") for t in (1, 4096)]
    for operator in ("moe_router_topk_softmax", "fused_moe_routing"):
        cases += [Router(operator, t, 128, 8, "f32") for t in (1, 32, 512, 4096)]
    cases += [Router("moe_router", t, 256, 8, "f32") for t in (1, 4096)]
    for operator in ("moe_compute_ids_tpe", "moe_bucket"):
        cases += [Bucket(operator, t, 128, 8, "i32") for t in (1, 32, 512, 4096)]
    cases += [Bucket("moe_bucket", 4096, 512, 10, "i32"), Bucket("moe_bucket", 32768, 128, 8, "i32")]
    for width in (2048, 4096):
        cases += [WeightedSum("weighted_sum_residual_norm_stacked_", t, 8, width, "f32") for t in (1, 32)]
    for operator in ("weighted_sum_stacked", "weighted_sum_residual_stacked_"):
        cases += [WeightedSum(operator, t, 8, 2048, "f32") for t in (1, 32)]
    cases += [WeightedReduce(t, 8, 2048, "bf16") for t in (1, 32, 4096)]
    cases += [SiluMul(s, 768, "f32") for s in (8, 256, 4096)]
    operators = ("norm_add", "norm_add_scalar", "residual_norm", "residual_norm_scalar")
    cases += [Norm(f"fused_{operator}", t, 2048, "f32") for operator in operators for t in (1, 32, 512, 8192)]
    cases += [LayerNorm(t, 4096, "bf16") for t in (1, 512)]
    return cases + [Norm("fused_norm_add", 8192, width, "bf16") for width in (128, 2048, 4096)]
