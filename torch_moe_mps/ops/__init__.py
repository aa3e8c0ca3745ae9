"""The operators, one module a family. Importing this package registers all of them."""

from . import (
    attention,
    combine,
    experts,
    heads,
    hyper_connection,
    index,
    linear,
    linear_attention,
    norms,
    pointwise,
    pooling,
    quantize,
    quantized,
    rope,
    routing,
    sampling,
)
from ._registry import OPERATORS

__all__ = [
    "OPERATORS",
    "attention",
    "combine",
    "experts",
    "heads",
    "hyper_connection",
    "index",
    "linear",
    "linear_attention",
    "norms",
    "pointwise",
    "pooling",
    "quantize",
    "quantized",
    "rope",
    "routing",
    "sampling",
]
