"""The operators, one module a family. Importing this package registers all of them."""

from . import combine, experts, linear, norms, quantized, routing
from ._registry import OPERATORS

__all__ = ["OPERATORS", "combine", "experts", "linear", "norms", "quantized", "routing"]
