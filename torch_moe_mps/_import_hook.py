"""Registers this package with torch and transformers, whichever is imported first.

Torch gets the operators; waiting for its import keeps `torch-moe-mps --help` fast. In transformers, the
experts implementation "moe_mps" goes with the experts interface, attention with sinks with the attention
interface, quantised checkpoints with the quantizers and `save_pretrained`.
"""

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _register_operators(module: object) -> None:
    from . import ops  # noqa: F401
    from ._extension import load_extension

    load_extension()


def _register_experts(module: Any) -> None:
    from .transformers.experts import NAME, experts_forward

    module.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _register_quantizer(module: object) -> None:
    from .transformers.checkpoints import quantizer  # noqa: F401


def _register_models(module: Any) -> None:
    from .transformers.attention import NAME, attention
    from .transformers.checkpoints.saving import describe_when_saving

    module.AttentionInterface.register(NAME, attention)
    describe_when_saving(module.PreTrainedModel)


def _register_mask(module: Any) -> None:
    from .transformers.attention import NAME, attention_mask

    module.AttentionMaskInterface.register(NAME, attention_mask)


def _register_adapters(module: Any) -> None:
    from .transformers.checkpoints.adapters import refuse_quantized

    refuse_quantized(module)


def _guarded(registration: Callable[[Any], None]) -> Callable[[Any], None]:
    """Whatever goes wrong with an unknown transformers must not break its import."""

    def register(module: Any) -> None:
        try:
            registration(module)
        except Exception as error:
            from importlib.metadata import version

            warnings.warn(
                f"torch_moe_mps: transformers {version('transformers')} is not supported, its models run "
                f"their own code (5.18 or newer is needed; {error})",
                stacklevel=3,
            )

    return register


_REGISTRATIONS = {
    "torch": _register_operators,
    "peft.peft_model": _guarded(_register_adapters),
    "transformers.masking_utils": _guarded(_register_mask),
    "transformers.modeling_utils": _guarded(_register_models),
    "transformers.integrations.moe": _guarded(_register_experts),
    "transformers.quantizers.auto": _guarded(_register_quantizer),
}


class _Loader(importlib.abc.Loader):
    """The loader of a module, with the registration after it."""

    def __init__(self, loader: importlib.abc.Loader, registration: Callable[[Any], None]):
        self.loader = loader
        self.registration = registration

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.registration(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the imports of the modules in `_REGISTRATIONS`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _REGISTRATIONS:
            return None
        # Only the finders behind this one: another copy of this package may be waiting, and ask this one.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (
            finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec")
        )
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _REGISTRATIONS[fullname])
        return spec


_FINDER = _Finder()


def register_when_imported() -> None:
    """Register with modules that are imported already now, with the others on their import.

    Nothing is imported for it. Calling it again, as a reload of the package does, changes nothing.
    """
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)
    for name, registration in _REGISTRATIONS.items():
        if name in sys.modules:
            registration(sys.modules[name])
