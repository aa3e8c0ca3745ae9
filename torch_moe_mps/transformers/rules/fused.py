"""What rewritten programs call, as `_moe_mps`."""

from .gate import gate
from .gated_delta import causal_conv, delta_rule
from .linear import linears
from .mlp import mlp
from .norms import norm_add, norm_add_scalar, residual_norm
from .ordering import in_order
from .residual import first_of, with_residual
from .rms_norm import rms_norm, rms_norm_forward
from .rope import rope
from .router import route, routed
from .router_logits import router_logits
from .shared import experts_with_shared

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
