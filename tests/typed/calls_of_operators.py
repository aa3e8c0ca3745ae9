"""Calls that mypy must and must not take: it reports an `ignore` that is not needed. Nothing runs them."""

import torch
from torch import Tensor

import torch_moe_mps
from torch_moe_mps import ops
from torch_moe_mps.ops.families.norms import fused_norm_add

x = torch.ones(3, 64)
scale = torch.ones(8)

topk_weights: Tensor
topk_weights, topk_ids = ops.moe_gate(x, x, x[0], scale, 2, norm_eps=1e-6, renormalize_after_scale=False)
out: Tensor = ops.moe_experts(
    x, topk_weights, topk_ids, x, x, activation="swiglu_oai", alpha=1.702, gate_up_bias=None
)
out = torch_moe_mps.ops.linear_quantized(x, x, x, None, format="mxfp4", residual=x, dtype="float32")
out = ops.weighted_sum_residual_stacked_(x, x, topk_weights)
out = fused_norm_add(x, x, x[0], norm_eps=1e-6)

ops.moe_gate("nonsense", x, x, scale, 2, norm_eps=1e-6, renormalize_after_scale=True)  # type: ignore[arg-type]
ops.moe_gate(x, x, x, scale, top_kk=3, norm_eps=1e-6)  # type: ignore[call-arg]
ops.moe_gate(x, x, x, scale, top_k=2, norm_eps=1e-6)  # type: ignore[call-arg]
ops.moe_router(x, 2)  # type: ignore[call-arg]
ops.moe_router_topk_softmax(x, 2, norm_topk_prob=True, ids_dtype=torch.int64)
ops.moe_router_topk_softmax(x, 2, norm_topk_prob=True, ids_dtype=3)  # type: ignore[arg-type]
ops.linear_quantized(x, x, x, None, format="mxfp4", dtype=torch.float32)
ops.linear_quantized(x, x, x, None, format="mxfp4", dtype=32)  # type: ignore[arg-type]
ops.moe_experts(x, topk_weights, topk_ids, x, x, None)  # type: ignore[call-arg]
ops.rms_norm(x, None, 1e-6)  # type: ignore[call-arg]
ops.no_such_operator(x)  # type: ignore[attr-defined]
number: int = ops.rms_norm(x, None, norm_eps=1e-6)  # type: ignore[assignment]
fused_norm_add(x, x, x[0])  # type: ignore[call-arg]
