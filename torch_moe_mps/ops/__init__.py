"""The operators: `moe_gate(...)` calls `torch.ops.moe_mps.moe_gate`. Importing this package registers all.

There is a module for each family, such as `norms`. Public operators are here, too; those whose names begin
with "_" serve the package alone and may change.
"""

from importlib import import_module
from pkgutil import iter_modules

from ._registry import OPERATORS as OPERATORS
from .attention import attention as attention
from .attention import write_cache_quantized_ as write_cache_quantized_
from .causal_conv1d import causal_conv1d_update_ as causal_conv1d_update_
from .combine import expert_activation as expert_activation
from .combine import moe_weighted_reduce as moe_weighted_reduce
from .combine import silu_mul_stacked as silu_mul_stacked
from .combine import weighted_sum_residual_norm_stacked_ as weighted_sum_residual_norm_stacked_
from .combine import weighted_sum_residual_stacked_ as weighted_sum_residual_stacked_
from .combine import weighted_sum_stacked as weighted_sum_stacked
from .experts import expert_mm as expert_mm
from .experts import moe_experts as moe_experts
from .gated_delta_rule import gated_delta_rule_ as gated_delta_rule_
from .heads import heads_mm as heads_mm
from .heads import heads_quantized as heads_quantized
from .hyper_connection import hyper_connection as hyper_connection
from .hyper_connection import hyper_update as hyper_update
from .linear import embedding_quantized as embedding_quantized
from .linear import linear_quantized as linear_quantized
from .linear import mlp_quantized as mlp_quantized
from .lora import expert_lora as expert_lora
from .lora import linear_lora as linear_lora
from .norms import fused_norm_add as fused_norm_add
from .norms import fused_norm_add_scalar as fused_norm_add_scalar
from .norms import fused_residual_layer_norm as fused_residual_layer_norm
from .norms import fused_residual_norm as fused_residual_norm
from .norms import fused_residual_norm_scalar as fused_residual_norm_scalar
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .norms import rms_norm_gated as rms_norm_gated
from .quantize import quantize_by_importance as quantize_by_importance
from .quantized import expert_qmm as expert_qmm
from .quantized import moe_experts_quantized as moe_experts_quantized
from .rope import rope as rope
from .rope import rope_cache_ as rope_cache_
from .routing import fused_moe_routing as fused_moe_routing
from .routing import moe_bucket as moe_bucket
from .routing import moe_compute_ids_tpe as moe_compute_ids_tpe
from .routing import moe_gate as moe_gate
from .routing import moe_router as moe_router
from .routing import moe_router_topk_softmax as moe_router_topk_softmax
from .routing import router_logits as router_logits
from .sampling import sample as sample
from .selective_scan import selective_scan_ as selective_scan_

# The families by name; other modules of this folder begin with "_".
FAMILIES = {
    module.name: import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if not module.name.startswith("_")
}
PUBLIC = {
    name: getattr(family, name)
    for family in FAMILIES.values()
    for name in family.CALLS
    if not name.startswith("_")
}


def __dir__() -> list[str]:
    """The public operators; the families and tables are there, too."""
    return sorted(PUBLIC)


globals().update(PUBLIC)  # `rope`, `attention` and `hyper_connection` are functions again, not their modules
