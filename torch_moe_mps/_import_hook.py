"""Registers this package with transformers, whichever of the two is imported first.

The experts implementation "moe_mps" goes with transformers' experts interface, attention with sinks with its
attention interface, quantised checkpoints with its quantizers and its `save_pretrained`.
"""

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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


_REGISTRATIONS = {
    "peft.peft_model": _register_adapters,
    "transformers.masking_utils": _register_mask,
    "transformers.modeling_utils": _register_models,
    "transformers.integrations.moe": _register_experts,
    "transformers.quantizers.auto": _register_quantizer,
}


def _register(module: object, registration: Callable[[object], None]) -> None:
    """Whatever goes wrong with an unknown transformers must not break its import."""
    try:
        registration(module)
    except Exception as error:
        from importlib.metadata import version

        warnings.warn(
            f"torch_moe_mps: transformers {version('transformers')} is not supported, its models run their "
            f"own code (5.18 or newer is needed; {error})",
            stacklevel=2,
        )


class _Loader(importlib.abc.Loader):
    """The loader of a module of transformers, with the registration after it."""

    def __init__(self, loader: importlib.abc.Loader, registration: Callable[[object], None]):
        self.loader = loader
        self.registration = registration

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        _register(module, self.registration)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of one module."""

    def __init__(self, name: str, registration: Callable[[object], None]):
        self.name = name
        self.registration = registration

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.registration)
        return spec


def register_when_imported() -> None:
    """Now for the modules that are there, else on their import; nothing is imported for it."""
    for name, registration in _REGISTRATIONS.items():
        if name in sys.modules:
            _register(sys.modules[name], registration)
        else:
            sys.meta_path.insert(0, _Finder(name, registration))
