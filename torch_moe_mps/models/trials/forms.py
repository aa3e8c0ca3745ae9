"""The form of a module's computation, found by trying them one after the other."""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..basics.code import code_of
from ..basics.report import Done
from ..basics.state import Unsupported, class_before, original_class
from .comparing import tried
from .draws import Draw, Draws
from .memory import recall_alike
from .replicas import ATTRIBUTES_OF_MODULES

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OF_NO_FORWARD = {"layer_idx", "_is_hf_initialized"}  # modules that compute the same may differ in these

Prepare = Callable[..., Callable[[Any], bool] | None]


def first_form(module: nn.Module, forms: Sequence[Any], prepare: Prepare, *arguments: Any) -> Any:
    """The first form that a module computes, None for none: tried once for all modules that are alike.

    The module's forward then rests on what they have in common. Raises: Unsupported if no trial reached a
    branch of the module's eager code.

    Args:
        forms: tried in this order; modules that are alike have the same.
        prepare: (module, *arguments) -> (form -> whether the module computes so). It makes what all forms are
            compared with, as a replica and its own results.
    """

    key, index = (prepare, class_before(module), arguments, _common(module)), vars(module).get("layer_idx")

    def run() -> Callable[[Any], bool] | None:
        return tried(prepare, module, *arguments)

    result = recall_alike(key, module, lambda: Trial(*found_form(forms, run), index))
    found, missing = result.form, result.missing
    if (
        found is not None and index != result.layer_idx
    ):  # it is alike but for the index, which its code may read
        again = recall_alike(
            (*key, index), module, lambda: Trial(*found_form(forms[found : found + 1], run, 1), index)
        )
        found, missing = None if again.form is None else found, again.missing
    if missing is not None:
        raise Unsupported(missing)
    return None if found is None else forms[found]


class Trial(NamedTuple):
    """Result of a trial: the number of the form, why no trial shows it, and the module's layer index."""

    form: int | None
    missing: str | None
    layer_idx: int | None

    def __bool__(self) -> bool:
        return self.form is not None


def found_form(
    forms: Sequence[Any], prepare: Callable[[], Callable[[Any], bool] | None], count: int | None = None
) -> tuple[int | None, str | None]:
    """(number of the first form that holds in each draw, None), or (None, why no trial shows it, if so).

    Args:
        prepare: runs eager code with a draw's numbers. Returns: form -> whether it gives the same; None if
            eager code cannot be run so.
        count: of draws; None: until each branch had its outcomes.
    """
    draws, missing = Draws(count), None
    prepared: dict[int, Callable[[Any], bool] | None] = {}

    def holds(form: Any, draw: Draw) -> bool:
        if draw.number not in prepared:
            prepared[draw.number] = prepare()
        compare = prepared[draw.number]
        return compare is not None and bool(tried(compare, form))

    for number, form in enumerate(forms):
        try:
            if draws(functools.partial(holds, form)):
                return number, None
        except Unsupported as error:
            missing = str(error)
    return None, missing


@dataclass(frozen=True)
class Tried:
    """A rule for modules that a trial recognises.

    Attributes:
        may_be: module -> whether it has what `forward` reads.
        forward: runs in place of the module's own.
        trial: (module, forward) -> whether both give the same.
        operators: that `forward` runs.
    """

    may_be: Callable[[nn.Module], bool]
    forward: Callable
    trial: Callable[[Any, Callable], bool]
    operators: tuple[Done, ...]

    def __call__(self, module: nn.Module) -> tuple[Callable, list[Done]] | None:
        """(forward, what runs), or None."""
        return (self.forward, [*self.operators]) if self.matches(module) else None

    def matches(self, module: nn.Module) -> bool:
        return self.may_be(module) and bool(first_form(module, (True,), _same_as, self.trial, self.forward))


def _same_as(module: nn.Module, trial: Callable, forward: Callable) -> Callable[[Any], bool]:
    return lambda _: trial(module, forward)


def made_alike(module: nn.Module, usual: nn.Module) -> bool:
    """True if a module has the classes and attributes of another one; its linear layers may be any."""
    modules, others = (dict(item.named_modules()) for item in (module, usual))
    if modules.keys() != others.keys():
        return False
    for path, other in others.items():
        attributes = dict(_attributes(modules[path]))
        same = all(
            _described(attributes.get(name)) == _described(value) for name, value in _attributes(other)
        )
        if not hasattr(other, "out_features") and not (
            same and original_class(modules[path]) is original_class(other)
        ):
            return False
    return True


def _common(module: nn.Module) -> tuple:
    """Key of modules whose forwards compute the same: classes, shapes and other attributes of all parts."""
    return tuple(
        (
            path,
            code_of(class_before(part)),
            *((name, _described(value)) for name, value in _attributes(part)),
            *((name, _described(value)) for name, value in (part._parameters | part._buffers).items()),
            *((name, _values_of(value)) for name, value in part._buffers.items()),
        )
        for path, part in module.named_modules()
    )


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module itself that its forward may rest on, in order."""
    return sorted(var for var in vars(module).items() if var[0] not in ATTRIBUTES_OF_MODULES | _OF_NO_FORWARD)


def _values_of(buffer: Tensor | None) -> Any:
    """Values of a buffer that a trial does not draw at random."""
    return None if buffer is None or buffer.is_floating_point() or buffer.is_meta else str(buffer.tolist())


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
    attributes = () if is_inside else sorted(vars(value).items()) if hasattr(value, "__dict__") else ()
    return type(value), *((name, _described(item, True)) for name, item in attributes)


def has_parts(module: nn.Module, layers: Iterable[str], numbers: Iterable[str]) -> bool:
    """True if a module has layers and numbers of these names."""
    has_layers = all(isinstance(module._modules.get(name), nn.Module) for name in layers)
    return has_layers and all(isinstance(getattr(module, name, None), int | float) for name in numbers)
