"""The operators: `moe_gate(...)` calls `torch.ops.moe_mps.moe_gate`. Importing this package registers all.

There is a module for each family in `families`. Public operators are here: those whose registration says what
users call them for (`public=`). Others have names that begin with "_", serve the package, and may change.
"""

from importlib import import_module
from pkgutil import iter_modules

from . import families
from ._registry import OPERATORS as OPERATORS
from ._registry import PUBLIC as PUBLIC
from .families.attention import cached_attention as cached_attention
from .families.causal_conv1d import causal_conv1d_update_ as causal_conv1d_update_
from .families.combine import expert_activation as expert_activation
from .families.combine import moe_weighted_reduce as moe_weighted_reduce
from .families.combine import silu_mul_stacked as silu_mul_stacked
from .families.combine import weighted_sum_residual_norm_stacked_ as weighted_sum_residual_norm_stacked_
from .families.combine import weighted_sum_residual_stacked_ as weighted_sum_residual_stacked_
from .families.combine import weighted_sum_stacked as weighted_sum_stacked
from .families.experts import expert_mm as expert_mm
from .families.experts import moe_experts as moe_experts
from .families.gated_delta_rule import gated_delta_rule_ as gated_delta_rule_
from .families.linear import embedding_quantized as embedding_quantized
from .families.linear import linear_quantized as linear_quantized
from .families.linear import mlp_quantized as mlp_quantized
from .families.lora import expert_lora as expert_lora
from .families.lora import linear_lora as linear_lora
from .families.norms import fused_norm_add as fused_norm_add
from .families.norms import fused_norm_add_scalar as fused_norm_add_scalar
from .families.norms import fused_residual_layer_norm as fused_residual_layer_norm
from .families.norms import fused_residual_norm as fused_residual_norm
from .families.norms import fused_residual_norm_scalar as fused_residual_norm_scalar
from .families.norms import layer_norm as layer_norm
from .families.norms import rms_norm as rms_norm
from .families.norms import rms_norm_gated as rms_norm_gated
from .families.quantized import expert_qmm as expert_qmm
from .families.quantized import moe_experts_quantized as moe_experts_quantized
from .families.rope import rope as rope
from .families.rope import rope_heads as rope_heads
from .families.routing import fused_moe_routing as fused_moe_routing
from .families.routing import moe_bucket as moe_bucket
from .families.routing import moe_compute_ids_tpe as moe_compute_ids_tpe
from .families.routing import moe_gate as moe_gate
from .families.routing import moe_router as moe_router
from .families.routing import moe_router_topk_softmax as moe_router_topk_softmax
from .families.routing import router_logits as router_logits
from .families.sampling import sample as sample
from .families.selective_scan import selective_scan_ as selective_scan_

FAMILIES = {
    module.name: import_module(f"{families.__name__}.{module.name}")
    for module in iter_modules(families.__path__)
}


def __dir__() -> list[str]:
    """The public operators; the families and tables are there, too."""
    return sorted(PUBLIC)
