"""Subclasses of models that capture their calls, and the state of capture in a model."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..._extension import host_library
from ..._limits import MOST_TOKENS
from ..basics.state import EMPTY_STATE, STATE, made_as, restore_class, state_in, state_of, subclass
from ..caches.cache import takes_cache
from ..modules.sampling import OPERATOR
from .candidates import DRAFTING
from .fingerprint import note_change
from .generate import members_of_generate
from .replay import Captures

_CAPTURING = "capturing"  # the kind of the classes that `_capturing_class` makes


def capture_calls(model: nn.Module, wanted: bool | None, max_tokens: int = MOST_TOKENS) -> None:
    """Enables captured calls for the models of transformers in a module, as `wanted_capture` decides.

    Args:
        max_tokens: of each row of a captured call.
    """
    note_change()
    for module in _models(model):
        may_be = wanted is not False and host_library() is not None
        state_of(module).captures = Captures(bool(wanted), bool(wanted), max_tokens) if may_be else None
        DRAFTING.pop(module, None)
        if made_as(type(module), _CAPTURING) is None:
            cls: Any = type(module)
            module.__class__ = _capturing_class(cls)


def restore_calls(model: nn.Module) -> None:
    """Undoes `capture_calls`. A class that was subclassed afterwards runs its eager forward."""
    note_change()
    for module in model.modules():
        if captures_in(module) is not None:
            state_of(module).captures = None
        DRAFTING.pop(module, None)
        restore_class(module, _CAPTURING)


def captures_in(model: nn.Module) -> Captures | None:
    """Captures of a model itself, or None if its calls are not captured."""
    found: Captures | None = state_in(model).captures
    return found


def captures_of(model: nn.Module) -> Captures | None:
    """Captures of the first model in a module that captures its calls."""
    return next(filter(None, map(captures_in, model.modules())), None)


def tokens_of(model: nn.Module) -> Callable[[], str | None]:
    """Function that describes how a model's tokens run; it holds no reference to the model."""
    captures = captures_of(model)
    known = (lambda: None) if captures is None else weakref.ref(captures)

    def says() -> str | None:
        result = known()
        return None if result is None else str(result)

    return says


def operators_of_calls(model: nn.Module) -> set[str]:
    """Operators that `generate` of a model runs beside the model."""
    return {OPERATOR} if any(_samples(type(module)) for module in model.modules()) else set()


def _samples(cls: type[nn.Module]) -> bool:
    """True for a class whose `generate` samples by the operator."""
    record = made_as(cls, _CAPTURING)
    return record is not None and getattr(record.original, "_sample", None) is not getattr(
        cls, "_sample", None
    )


def _models(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers that take a cache."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, PreTrainedModel) and takes_cache(module):
            inside.update(module.modules())
            yield module


@functools.cache
def _capturing_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that captures calls, and whose `generate` gives no tokens out that the
    GPU failed at, and reads MTP layers once; everything else stays."""
    eager: Callable[..., Any] = original.forward
    parameters = inspect.signature(eager).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if original.forward is not eager:  # somebody has patched the class
            return original.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return eager(self, *args, **kwargs)
        captures: Captures | None = getattr(self, STATE, EMPTY_STATE).captures
        if captures is None or len(args) > len(names):
            return eager(self, *args, **kwargs)
        if args:
            arguments = dict(zip(names, args, strict=False))
            if not arguments.keys().isdisjoint(kwargs):
                return eager(self, *args, **kwargs)  # it raises the error
            kwargs |= arguments
        return captures.call(self, eager, kwargs)

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if (captures := captures_in(self)) is not None:
            captures.clear()  # they hold the weights that go
        return original._apply(self, *args, **kwargs)

    members = {"forward": forward, "_apply": apply, **members_of_generate(original)}
    return subclass(original, _CAPTURING, _capturing_class, **members)
