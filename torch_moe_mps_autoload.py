"""Registers torch_moe_mps with torch and transformers when they are imported, whoever imports them.

`import torch` calls `autoload` through the entry point "torch.backends" of pyproject.toml. It only puts a
finder in front of Python's import system: torch_moe_mps is imported after the first of the modules in
_LIBRARIES. This module is no part of the package because importing a part of a package imports the package.

One rule keeps what registers from meeting modules that are half made: nothing is registered, with torch or
with transformers, while a module of torch_moe_mps is in the middle of its import. A module of the package may
so import torch or transformers in any place, and what registers may import any module of the package. Modules
of the package that use an operator while they are imported import torch_moe_mps.ops themselves.
"""

import contextlib
import functools
import importlib
import importlib.abc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Modules, and the functions of torch_moe_mps._registration that are called after their import.
_LIBRARIES = {
    "peft": "register_adapters",
    "transformers.core_model_loading": "load_in_one_thread",
    "transformers.masking_utils": "register_mask",
    "transformers.modeling_utils": "register_models",
    "transformers.integrations.moe": "register_experts",
    "transformers.integrations.gguf.gguf_config_mapping": "register_gguf",
    "transformers.quantizers": "register_quantizer",  # whole: ours takes a class of another of its modules
    "trl.trainer.utils": "register_trl",
}
_TORCH = {"torch": "register_operators"}
_PACKAGE = "torch_moe_mps"


def autoload() -> None:
    """The entry point. torch takes an exception for a reason to refuse its own import, so none gets out."""
    try:
        if os.environ.get("MOE_MPS_AUTOLOAD") != "0":
            _FINDER.wait_for(_LIBRARIES)
        else:
            _Finder().wait_for({"transformers.quantizers.auto": _name_the_package})
    except Exception as error:
        _warn(f"torch_moe_mps will not be loaded with transformers ({error})")


def _name_the_package(module: Any) -> None:
    """Checkpoints of the package are refused by its name, where transformers would miss a quant_method."""
    own = module.AutoHfQuantizer.supports_quant_method

    @functools.wraps(own)
    def supports(stored: Any) -> bool:
        if isinstance(stored, dict) and "quant_method" not in stored and stored.get("library") == _PACKAGE:
            says = "`import torch_moe_mps` reads it, which MOE_MPS_AUTOLOAD=0 leaves to you"
            raise ValueError(f"the checkpoint is quantised by torch_moe_mps: {says}")
        return bool(own(stored))

    module.AutoHfQuantizer.supports_quant_method = staticmethod(supports)


def register_when_imported() -> None:
    """Register with the modules that are imported, and with the others once they are."""
    _FINDER.wait_for(_TORCH | _LIBRARIES)
    _FINDER.catch_up()


class _Finder(importlib.abc.MetaPathFinder):
    """Calls functions after the import of modules.

    They are called one after the other, and when no module of the package is in the middle of its import. As
    they import more of transformers, those of its modules wait for the other modules of `functions`, too.

    Attributes:
        functions: the function for each module, or its name in torch_moe_mps._registration.
        missed: modules whose import began before this finder waited for them. Those in the middle of it, such
            as a module of transformers that imports torch, get their call after the next import.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str | Callable[[Any], None]] = {}
        self.missed: list[str] = []
        self._due: list[str] = []
        self._importing: list[str] = []
        self._calling = False
        self._searching: set[str] = set()

    def wait_for(self, functions: Mapping[str, str | Callable[[Any], None]]) -> None:
        """Calling this again with the same modules, as a reload of the package does, changes nothing."""
        self.missed += [name for name in functions if name in sys.modules and name not in self.functions]
        self.functions |= functions
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def catch_up(self) -> None:
        """Make the calls for the missed modules whose import is complete."""
        complete = self._complete()
        self.missed = [name for name in self.missed if name not in complete]
        self._due += complete
        while name := self._next():
            self._due.remove(name)
            self._calling = True
            try:
                _register(name, self.functions[name])
            finally:
                self._calling = False

    def _next(self) -> str | None:
        """The module whose function can be called now. That of torch needs nothing of transformers."""
        if any(map(_is_own, self._importing)):
            return None
        incomplete = self._importing or any(name in sys.modules for name in self.missed)
        ready = [name for name in self._due if name in _TORCH or not incomplete]
        return ready[0] if ready and not self._calling else None

    def _complete(self) -> list[str]:
        loaded = (name for name in self.missed if name in sys.modules)
        specs = {name: getattr(sys.modules[name], "__spec__", None) for name in loaded}
        return [name for name, spec in specs.items() if not getattr(spec, "_initializing", False)]

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        awaited = fullname in self.functions or _is_own(fullname)
        if fullname in self._searching or not (awaited or self._complete()):
            return None
        self._searching.add(fullname)  # another finder may ask all finders, as this one does
        try:
            others = (
                finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
            )
            spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        finally:
            self._searching.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec

    @contextlib.contextmanager
    def _around(self, fullname: str) -> Iterator[None]:
        """The import of a module. Behind one that fails, too, the calls that waited for its end are made."""
        self._importing.append(fullname)
        try:
            yield
            if fullname in self.functions:
                self.missed = [name for name in self.missed if name != fullname]  # its first import failed
                self._due.append(fullname)
        finally:
            self._importing.remove(fullname)
            self.catch_up()


class _Loader(importlib.abc.Loader):
    """Another loader, whose work is done inside of the context that `around` makes."""

    def __init__(self, loader: Any, around: Callable[[str], AbstractContextManager[None]]):
        self.loader = loader
        self.around = around

    def __getattr__(self, name: str) -> Any:  # `python -m` asks for the code of a module, and makes none
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.around(module.__name__):
            self.loader.exec_module(module)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def _register(module: str, function: str | Callable[[Any], None]) -> None:
    """Whatever goes wrong must not break the import of transformers."""
    try:
        register: Callable[[Any], None] = (
            getattr(importlib.import_module("torch_moe_mps._registration"), function)
            if isinstance(function, str)
            else function
        )
    except Exception as error:
        _warn(f"torch_moe_mps cannot be imported, models of transformers run their own code ({error})")
        return
    try:
        register(sys.modules[module])
    except Exception as error:
        if module in _TORCH:  # the program imports torch_moe_mps itself
            raise
        library = module.partition(".")[0]
        version = getattr(sys.modules[library], "__version__", "of unknown version")
        _warn(f"torch_moe_mps: {library} {version} is not supported, its models run their own code ({error})")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


_FINDER = _Finder()
