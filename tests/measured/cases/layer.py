"""The cases of norms, combine and routing."""

from typing import ClassVar

import torch

from .experts import Case
from .operators import EPS, OperatorCase


class Norm(OperatorCase, fields="operator rows width dtype"):
    group = "norms"
    tensors = "residual[rows, width]"
    options: ClassVar[dict] = {"norm_eps": EPS}


class LayerNorm(OperatorCase, fields="rows width dtype"):
    group = "norms"
    operator = "layer_norm"
    tensors = "x[rows, width] norm_weight[width]:f32 bias[width]:f32"
    options: ClassVar[dict] = {"norm_eps": EPS}


class SiluMul(OperatorCase, fields="slots width dtype"):
    group = "combine"
    operator = "silu_mul_stacked"
    tensors = "gate[slots, width]"


class WeightedSum(OperatorCase, fields="operator rows slots width dtype"):
    """weighted_sum_stacked, weighted_sum_residual_stacked_, weighted_sum_residual_norm_stacked_."""

    group = "combine"
    tensors = "expert_out[rows, slots, width]"

    @property
    def options(self):
        return {"norm_eps": EPS} if "norm" in self.operator else {}


class WeightedReduce(OperatorCase, fields="rows slots width dtype"):
    """moe_weighted_reduce with a shared expert and a residual."""

    group = "combine"
    operator = "moe_weighted_reduce"
    tensors = (
        "expert_out[rows, slots, width] shared_gate[rows]:f32 shared_out[rows, width] residual[rows, width]"
    )
    options: ClassVar[dict] = {"gate_is_logit": True}


class Router(OperatorCase, fields="operator rows experts top_k dtype"):
    """moe_router_topk_softmax, fused_moe_routing, and moe_router with sigmoid, bias and groups."""

    group = "routing"
    scales: ClassVar[dict] = {"logits": 2.0, "correction_bias": 0.1}

    OPTIONS: ClassVar[dict] = {
        "moe_router_topk_softmax": {"norm_topk_prob": True},
        "fused_moe_routing": {},
        "moe_router": {
            **{"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "group_score": "top2_sum"},
            **{"norm_topk_prob": True, "scaling_factor": 2.5},
        },
    }

    @property
    def tensors(self):
        return "logits[rows, experts]" + " correction_bias[experts]:f32" * (self.operator == "moe_router")

    @property
    def options(self):
        return {"top_k": self.top_k, **self.OPTIONS[self.operator]}


class Gate(OperatorCase, fields="tokens experts width top_k dtype"):
    """`dtype` is of the router's weight."""

    group = "routing"
    operator = "moe_gate"
    tensors = "x[tokens, width]:bf16 weight[experts, width]"
    scales: ClassVar[dict] = {"weight": 0.05}
    slack = 2e-5

    def others(self, values):
        """Scales of one sign: the weights of a token are divided by their sum."""
        return {"per_expert_scale": values.uniform(self.experts, low=0.5, high=1.5)}

    @property
    def options(self):
        return {"top_k": self.top_k, "norm_eps": EPS, "renormalize_after_scale": True}


class Bucket(OperatorCase, fields="operator tokens experts top_k dtype"):
    """moe_bucket and moe_compute_ids_tpe."""

    group = "routing"

    ROWS = (768, 2048)  # of the matrices whose grids moe_compute_ids_tpe gives

    def others(self, values):
        dtype = {"i32": torch.int32, "i64": torch.int64}[self.dtype]
        return {"topk_ids": values.skewed_ids(self.tokens, self.top_k, self.experts, dtype)}

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
