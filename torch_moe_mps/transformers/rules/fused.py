"""What rewritten programs call, as `_moe_mps`."""

from .gate import gate
from .norms import norm_add, norm_add_scalar, residual_norm
from .router import route, routed
from .shared import experts_with_shared

__all__ = [
    "experts_with_shared",
    "gate",
    "norm_add",
    "norm_add_scalar",
    "residual_norm",
    "route",
    "routed",
]
