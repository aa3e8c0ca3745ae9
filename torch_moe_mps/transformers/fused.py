"""What rewritten programs call, as `_moe_mps`."""

from .blocks import experts_with_shared
from .norms import norm_add, norm_add_scalar, residual_norm
from .routers import route

__all__ = ["experts_with_shared", "norm_add", "norm_add_scalar", "residual_norm", "route"]
