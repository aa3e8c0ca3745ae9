"""What rewritten programs call, as `_moe_mps`."""

from .blocks import experts_with_shared
from .gates import gate
from .norms import norm_add, norm_add_scalar, residual_norm
from .routers import route, routed

__all__ = [
    "experts_with_shared",
    "gate",
    "norm_add",
    "norm_add_scalar",
    "residual_norm",
    "route",
    "routed",
]
