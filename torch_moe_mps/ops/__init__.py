"""The operators, one module a family. Importing this package registers all of them."""

from importlib import import_module
from pkgutil import iter_modules

from ._registry import OPERATORS

# The families by name; other modules of this folder begin with "_".
FAMILIES = {
    module.name: import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if not module.name.startswith("_")
}

__all__ = ["FAMILIES", "OPERATORS"]
