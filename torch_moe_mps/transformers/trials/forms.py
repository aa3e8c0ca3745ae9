"""The form of a module's computation, found by trying them one after the other."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..basics.reads import depends_on
from ..basics.report import Done
from ..basics.state import original_class
from .comparing import tried
from .memory import recall
from .twins import ATTRIBUTES_OF_MODULES

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OF_NO_FORWARD = {"layer_idx", "_is_hf_initialized"}  # modules that compute the same may differ in these

Begin = Callable[..., Callable[[Any], bool]]


def first_form(
    module: nn.Module, forms: Sequence[Any], begin: Begin, *arguments: Any, apart: Sequence[str] = ()
) -> Any:
    """The first form that a module computes, None for none: tried once for all modules that are alike.

    The module's forward then rests on what they have in common.

    Args:
        forms: tried in this order; modules that are alike have the same.
        begin: (module, *arguments) -> (form -> whether the module computes so). It makes what all forms are
            compared with, as a twin and its own results.
        apart: attributes in which modules that compute the same may differ.
    """

    def place() -> int | None:
        holds = tried(begin, module, *arguments)
        found = (n for n, form in enumerate(forms) if holds is not None and tried(holds, form))
        return next(found, None)

    found: int | None = recall((begin, original_class(module), arguments, _common(module, apart)), place)
    for part in module.modules():
        numbers = () if hasattr(part, "out_features") else _attributes(part)
        plain = (name for name, value in numbers if isinstance(value, (*_PLAIN, tuple)))
        for name in (*(name for name in plain if name not in apart), *part._modules):
            depends_on(part, name)
    return None if found is None else forms[found]


@dataclass(frozen=True)
class Tried:
    """A rule for modules that a trial recognises.

    Attributes:
        may_be: module -> whether it has what `forward` reads.
        forward: runs in place of the module's own.
        trial: (module, forward) -> whether both give the same.
        operators: that `forward` runs.
        apart: attributes in which modules that compute the same may differ.
    """

    may_be: Callable[[nn.Module], bool]
    forward: Callable
    trial: Callable[[Any, Callable], bool]
    operators: tuple[Done, ...]
    apart: tuple[str, ...] = ()

    def __call__(self, module: nn.Module) -> tuple[Callable, list[Done]] | None:
        """(forward, what runs), or None."""
        return (self.forward, [*self.operators]) if self.matches(module) else None

    def matches(self, module: nn.Module) -> bool:
        return self.may_be(module) and bool(
            first_form(module, (True,), _same_as, self.trial, self.forward, apart=self.apart)
        )


def _same_as(module: nn.Module, trial: Callable, forward: Callable) -> Callable[[Any], bool]:
    return lambda _: trial(module, forward)


def made_alike(module: nn.Module, usual: nn.Module) -> bool:
    """Whether a module has the classes and attributes of another one; its linear layers may be any."""
    own, others = (dict(item.named_modules()) for item in (module, usual))
    if own.keys() != others.keys():
        return False
    for path, other in others.items():
        held = dict(_attributes(own[path]))
        same = all(_described(held.get(name)) == _described(value) for name, value in _attributes(other))
        if not hasattr(other, "out_features") and not (
            same and original_class(own[path]) is original_class(other)
        ):
            return False
    return True


def _common(module: nn.Module, apart: Sequence[str] = ()) -> tuple:
    """Key of modules whose forwards compute the same: classes, shapes and other attributes of all parts."""
    return tuple(
        (
            path,
            original_class(part),
            original_class(part).forward,
            *((name, _described(value)) for name, value in _attributes(part) if name not in apart),
            *((name, _described(value)) for name, value in (part._parameters | part._buffers).items()),
        )
        for path, part in module.named_modules()
    )


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module itself that its forward may rest on, in order."""
    return sorted(var for var in vars(module).items() if var[0] not in ATTRIBUTES_OF_MODULES | _OF_NO_FORWARD)


def _described(value: Any, is_inside: bool = False) -> Any:
    """A value that is equal for equal attributes; of an object, as a config, its own plain ones count."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list | dict):
        values = value.items() if isinstance(value, dict) else value
        return type(value), *(_described(item, is_inside) for item in values)
    if isinstance(value, _PLAIN):
        return type(value), value
    if callable(value) and isinstance(value, Hashable):  # functions and classes
        return value
    own = () if is_inside else sorted(vars(value).items()) if hasattr(value, "__dict__") else ()
    return type(value), *((name, _described(item, True)) for name, item in own)


def has_parts(module: nn.Module, layers: Iterable[str], numbers: Iterable[str]) -> bool:
    """Whether a module has layers and numbers of these names."""
    own = all(isinstance(module._modules.get(name), nn.Module) for name in layers)
    return own and all(isinstance(getattr(module, name, None), int | float) for name in numbers)
