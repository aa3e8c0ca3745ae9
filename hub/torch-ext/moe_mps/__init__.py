# SPDX-License-Identifier: BSD-3-Clause
"""Metal kernels of Mixture-of-Experts models: layers for transformers' kernel mapping, and operators."""

from pathlib import Path

from . import layers
from ._ops import ops
from ._tables import FORMATS
from .operators import (
    fused_moe_routing,
    fused_norm_add,
    fused_norm_add_scalar,
    fused_residual_norm,
    fused_residual_norm_scalar,
    moe_compute_ids_tpe,
    moe_gate,
    moe_router_topk_softmax,
    moe_weighted_reduce,
    silu_mul_stacked,
    weighted_sum_residual_norm_stacked_,
    weighted_sum_residual_stacked_,
    weighted_sum_stacked,
)

__all__ = [
    "fused_moe_routing",
    "fused_norm_add",
    "fused_norm_add_scalar",
    "fused_residual_norm",
    "fused_residual_norm_scalar",
    "layers",
    "moe_compute_ids_tpe",
    "moe_gate",
    "moe_router_topk_softmax",
    "moe_weighted_reduce",
    "silu_mul_stacked",
    "weighted_sum_residual_norm_stacked_",
    "weighted_sum_residual_stacked_",
    "weighted_sum_stacked",
]

# The host reads its Metal text from the package, and has the formats of weights from the table.
ops._set_shader_directory(str(Path(__file__).parent / "shaders"))
for _format in FORMATS:
    ops._add_format(*_format)
ops._commit_every(-1)
ops._set_tensor_units("0")
