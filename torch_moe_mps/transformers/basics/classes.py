"""Subclasses that take the place of a module's class: its name and documentation stay, and copies are of the
class itself. Each kind of them has a mark: the attribute that names the class before.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_MADE = "_moe_mps_made"  # in a class that `subclass` made: (what gives the class of copies, the class before)


def subclass(
    original: type[nn.Module], mark: str, class_of_copies: Callable[[type], type], **members: Any
) -> type[nn.Module]:
    """The subclass of `original` with these members.

    Args:
        class_of_copies: gives the class of the empty module that a copy or a pickle begins with, from
            `original`.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        if type(self) is not cls:  # a class on top has its own way, or none
            return reduced
        return _copy_of, (class_of_copies, _recipe(original)), *reduced[2:]

    names = ("__module__", "__qualname__", "__doc__")
    members |= {name: getattr(original, name) for name in names}
    members |= {"__reduce_ex__": reduce, _MADE: (class_of_copies, original), mark: original}
    cls: type[nn.Module] = type(original.__name__, (original,), members)
    return cls


def restore_class(module: nn.Module, mark: str) -> None:
    """Gives a module the class before one with a mark; beneath a class that somebody put on top, it stays."""
    original = vars(type(module)).get(mark)
    if original is not None:
        module.__class__ = original


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class of a module beneath all that `subclass` made; one that was put on top later stays."""
    cls = type(module)
    while _MADE in vars(cls):
        cls = vars(cls)[_MADE][1]
    return cls


def _recipe(cls: type[nn.Module]) -> Any:
    """A class as a pickle names it; generated ones as (factory, recipe of the base)."""
    made = vars(cls).get(_MADE)
    return cls if made is None else (made[0], _recipe(made[1]))


def _class_of(recipe: Any) -> type[nn.Module]:
    return recipe if isinstance(recipe, type) else recipe[0](_class_of(recipe[1]))


def _copy_of(class_of_copies: Callable[[type], type], recipe: Any) -> nn.Module:
    cls: Any = class_of_copies(_class_of(recipe))
    return cls.__new__(cls)
