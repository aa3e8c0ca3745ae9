"""The cases of norms, combine and routing."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .experts import Case
from .formats import DTYPES
from .operators import EPS, OperatorCase


@dataclass
class Norm(OperatorCase):
    group: ClassVar[str] = "norms"
    operator: str
    rows: int
    width: int
    dtype: str

    @property
    def scaled(self) -> bool:
        return self.operator.endswith("scalar")

    def inputs(self, values):
        scalar = {"scalar": values.normal(1, offset=2.0)} if self.scaled else {}
        rows = {name: self.random(values, self.rows, self.width) for name in ("residual", "input")}
        return {**rows, "weight": values.normal(self.width), **scalar}

    def given(self, t):
        return t | {"eps": EPS}


@dataclass
class LayerNorm(OperatorCase):
    group: ClassVar[str] = "norms"
    operator: ClassVar[str] = "layer_norm"
    rows: int
    width: int
    dtype: str

    def inputs(self, values):
        weights = {name: values.normal(self.width) for name in ("weight", "bias")}
        return {"input": self.random(values, self.rows, self.width), **weights}

    def given(self, t):
        return t | {"eps": EPS}


@dataclass
class SiluMul(OperatorCase):
    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "silu_mul_stacked"
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        return {name: self.random(values, self.slots, self.width) for name in ("gate", "up")}


@dataclass
class WeightedSum(OperatorCase):
    """weighted_sum_stacked, weighted_sum_residual_stacked_, weighted_sum_residual_norm_stacked_."""

    group: ClassVar[str] = "combine"
    operator: str
    rows: int
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        t = {"slots": self.random(values, self.rows, self.slots, self.width)}
        t["weights"] = values.normal(self.rows, self.slots)
        if "residual" in self.operator:
            t["residual_"] = self.random(values, self.rows, self.width)
        if "norm" in self.operator:
            t["norm_weight"] = values.normal(self.width)
        return t

    def given(self, t):
        return t | ({"eps": EPS} if "norm" in self.operator else {})


@dataclass
class WeightedReduce(OperatorCase):
    """moe_weighted_reduce with a shared expert and a residual."""

    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "moe_weighted_reduce"
    rows: int
    slots: int
    width: int
    dtype: str

    def inputs(self, values):
        return {
            "weights": values.normal(self.rows, self.slots),
            "expert_out": self.random(values, self.rows, self.slots, self.width),
            "shared_gate": values.normal(self.rows),
            "shared_out": self.random(values, self.rows, self.width),
            "residual": self.random(values, self.rows, self.width),
        }

    def given(self, t):
        return t | {"gate_is_logit": True}


@dataclass
class Router(OperatorCase):
    """moe_router_topk_softmax, fused_moe_routing, and moe_router with sigmoid, bias and groups."""

    group: ClassVar[str] = "routing"
    operator: str
    rows: int
    experts: int
    top_k: int
    dtype: str

    OPTIONS: ClassVar[dict[str, dict]] = {
        "moe_router_topk_softmax": {"norm_topk_prob": True},
        "fused_moe_routing": {},
        "moe_router": {
            **{"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "group_score": "top2_sum"},
            **{"norm_topk_prob": True, "scaling_factor": 2.5},
        },
    }

    def inputs(self, values):
        t = {"logits": values.normal(self.rows, self.experts, dtype=DTYPES[self.dtype], scale=2.0)}
        if self.operator == "fused_moe_routing":
            t["per_expert_scale"] = values.normal(self.experts)
        if self.operator == "moe_router":
            t["bias"] = values.normal(self.experts, scale=0.1)
        return t

    def given(self, t):
        return t | {"top_k": self.top_k, **self.OPTIONS[self.operator]}


@dataclass
class Gate(OperatorCase):
    group: ClassVar[str] = "routing"
    operator: ClassVar[str] = "moe_gate"
    slack: ClassVar[float] = 2e-5
    tokens: int
    experts: int
    width: int
    top_k: int
    dtype: str  # of the router's weight; hidden is bfloat16

    def inputs(self, values):
        return {
            "hidden": values.normal(self.tokens, self.width, dtype=torch.bfloat16),
            "router_weight": values.normal(self.experts, self.width, dtype=DTYPES[self.dtype], scale=0.05),
            "norm_weight": values.normal(self.width),
            "per_expert_scale": values.uniform(self.experts, low=0.5, high=1.5),
        }

    def given(self, t):
        return t | {"top_k": self.top_k, "eps": EPS}


@dataclass
class Bucket(OperatorCase):
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

    def given(self, t):
        grids = dict(zip(("gate_up_rows", "down_rows"), self.ROWS, strict=True))
        return t | {"num_experts": self.experts, **(grids if self.operator == "moe_compute_ids_tpe" else {})}


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
