"""Registers this package with transformers, whichever of the two is imported first.

The experts implementation "moe_mps" goes with transformers' experts interface, quantised checkpoints with its
quantizers.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable


def _register_experts(module: object) -> None:
    from .transformers.experts import NAME, experts_forward

    module.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _register_quantizer(module: object) -> None:
    from .transformers import saving  # noqa: F401


_REGISTRATIONS = {
    "transformers.integrations.moe": _register_experts,
    "transformers.quantizers.auto": _register_quantizer,
}


class _Loader(importlib.abc.Loader):
    """The loader of a module of transformers, with the registration after it."""

    def __init__(self, loader: importlib.abc.Loader, register: Callable[[object], None]):
        self.loader = loader
        self.register = register

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self.loader
        self.register(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of one module, once."""

    def __init__(self, name: str, register: Callable[[object], None]):
        self.name = name
        self.register = register

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.register)
        return spec


def register_when_imported() -> None:
    """Now for the modules that are there, else on their import; nothing is imported for it."""
    for name, register in _REGISTRATIONS.items():
        if name in sys.modules:
            register(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name, register))
