"""What rewritten programs call, as `_moe_mps`."""

from .rules.gated_delta import causal_conv, delta_rule
from .rules.linear import linears
from .rules.mlp import mlp
from .rules.moe_gate import gate
from .rules.norms import norm_add, norm_add_scalar, residual_norm
from .rules.ordering import in_order
from .rules.residual import first_of, with_residual
from .rules.rms_norm import rms_norm, rms_norm_forward
from .rules.rope import rope
from .rules.router import route, routed
from .rules.router_logits import router_logits
from .rules.shared import experts_with_shared

__all__ = [
    "causal_conv",
    "delta_rule",
    "experts_with_shared",
    "first_of",
    "gate",
    "in_order",
    "linears",
    "mlp",
    "norm_add",
    "norm_add_scalar",
    "residual_norm",
    "rms_norm",
    "rms_norm_forward",
    "rope",
    "route",
    "routed",
    "router_logits",
    "with_residual",
]
