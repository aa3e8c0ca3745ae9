"""What rewritten programs call, as `_moe_mps`."""

from .gate import gate
from .linear import linears
from .mlp import mlp
from .norms import norm_add, norm_add_scalar, residual_norm
from .residual import with_residual
from .rms_norm import rms_norm, rms_norm_forward
from .rope import rope
from .router import route, routed
from .shared import experts_with_shared

__all__ = [
    "experts_with_shared",
    "gate",
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
    "with_residual",
]
