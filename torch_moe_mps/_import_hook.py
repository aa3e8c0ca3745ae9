"""Registers the experts implementation "moe_mps" with transformers, whichever of the two is imported first."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

_TARGET = "transformers.integrations.moe"


def _register(module: object) -> None:
    from .transformers.experts import register

    register(module.ALL_EXPERTS_FUNCTIONS)


class _Loader(importlib.abc.Loader):
    """The loader of transformers' module, with the registration after it."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self.loader
        _register(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of transformers' module, once."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register_when_imported() -> None:
    """Now if transformers' module is there, else on its import; nothing is imported for it."""
    if _TARGET in sys.modules:
        _register(sys.modules[_TARGET])
    else:
        sys.meta_path.insert(0, _Finder())
