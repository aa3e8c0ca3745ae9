"""The operators, one module a family. Importing this package registers all of them."""

from . import norms
from ._registry import OPERATORS

__all__ = ["OPERATORS", "norms"]
