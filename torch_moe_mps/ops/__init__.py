"""The operators: `moe_gate(...)` calls `torch.ops.moe_mps.moe_gate`. Importing this package registers all.

There is a module for each family, such as `norms`. Public operators are here, too; those whose names begin
with "_" serve the package alone and may change. `__init__.pyi` has the signatures, for type checkers.
"""

from importlib import import_module
from pkgutil import iter_modules

from ._registry import OPERATORS

# The families by name; other modules of this folder begin with "_".
FAMILIES = {
    module.name: import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if not module.name.startswith("_")
}
PUBLIC = {
    name: getattr(family, name)
    for family in FAMILIES.values()
    for name in family.CALLS
    if not name.startswith("_")
}
globals().update(PUBLIC)  # `rope`, `attention` and `hyper_connection` are functions here, not their modules

__all__ = ["FAMILIES", "OPERATORS", "PUBLIC", *PUBLIC]
