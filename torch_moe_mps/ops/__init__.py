"""The operators, one module a family. Importing this package registers all of them."""

from . import experts, norms, quantized
from ._registry import OPERATORS

__all__ = ["OPERATORS", "experts", "norms", "quantized"]
