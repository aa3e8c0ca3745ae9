"""The cases of norms, combine and routing."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .experts import Case
from .operators import EPS, OperatorCase


@dataclass
class Norm(OperatorCase):
    group: ClassVar[str] = "norms"
    tensors: ClassVar[str] = "residual[rows, width]"
    options: ClassVar[dict] = {"eps": EPS}
    operator: str
    rows: int
    width: int
    dtype: str


@dataclass
class LayerNorm(OperatorCase):
    group: ClassVar[str] = "norms"
    operator: ClassVar[str] = "layer_norm"
    tensors: ClassVar[str] = "input[rows, width] weight[width]:f32 bias[width]:f32"
    options: ClassVar[dict] = {"eps": EPS}
    rows: int
    width: int
    dtype: str


@dataclass
class SiluMul(OperatorCase):
    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "silu_mul_stacked"
    tensors: ClassVar[str] = "gate[slots, width]"
    slots: int
    width: int
    dtype: str


@dataclass
class WeightedSum(OperatorCase):
    """weighted_sum_stacked, weighted_sum_residual_stacked_, weighted_sum_residual_norm_stacked_."""

    group: ClassVar[str] = "combine"
    tensors: ClassVar[str] = "slots[rows, slots, width]"
    operator: str
    rows: int
    slots: int
    width: int
    dtype: str

    @property
    def options(self):
        return {"eps": EPS} if "norm" in self.operator else {}


@dataclass
class WeightedReduce(OperatorCase):
    """moe_weighted_reduce with a shared expert and a residual."""

    group: ClassVar[str] = "combine"
    operator: ClassVar[str] = "moe_weighted_reduce"
    tensors: ClassVar[str] = (
        "expert_out[rows, slots, width] shared_gate[rows]:f32 shared_out[rows, width] residual[rows, width]"
    )
    options: ClassVar[dict] = {"gate_is_logit": True}
    rows: int
    slots: int
    width: int
    dtype: str


@dataclass
class Router(OperatorCase):
    """moe_router_topk_softmax, fused_moe_routing, and moe_router with sigmoid, bias and groups."""

    group: ClassVar[str] = "routing"
    scales: ClassVar[dict] = {"logits": 2.0, "bias": 0.1}
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

    @property
    def tensors(self):
        return "logits[rows, experts]" + " bias[experts]:f32" * (self.operator == "moe_router")

    @property
    def options(self):
        return {"top_k": self.top_k, **self.OPTIONS[self.operator]}


@dataclass
class Gate(OperatorCase):
    group: ClassVar[str] = "routing"
    operator: ClassVar[str] = "moe_gate"
    tensors: ClassVar[str] = "hidden[tokens, width]:bf16 router_weight[experts, width]"
    scales: ClassVar[dict] = {"router_weight": 0.05}
    slack: ClassVar[float] = 2e-5
    tokens: int
    experts: int
    width: int
    top_k: int
    dtype: str  # of the router's weight

    @property
    def options(self):
        return {"top_k": self.top_k, "eps": EPS}


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

    def others(self, values):
        dtype = {"i32": torch.int32, "i64": torch.int64}[self.dtype]
        return {"ids": values.skewed_ids(self.tokens, self.top_k, self.experts, dtype)}

    @property
    def options(self):
        grids = dict(zip(("gate_up_rows", "down_rows"), self.ROWS, strict=True))
        return {"num_experts": self.experts, **(grids if self.operator == "moe_compute_ids_tpe" else {})}


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
