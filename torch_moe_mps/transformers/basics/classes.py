"""Subclasses that take the place of a module's class: its name and documentation stay, and copies are of the
class itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

MADE = "_moe_mps_made"  # the attribute of a class that `subclass` made: its Made


class Made(NamedTuple):
    """How a class was made.

    Attributes:
        kind: of the classes that stand for others.
        class_of_copies: gives the class of the empty module that a copy or a pickle begins with, from
            `original`.
        original: the class in whose place it is.
        own: the forward that this one had when the class was made.
        ours: the forward that a rewritten module runs; None for other kinds.
    """

    kind: str
    class_of_copies: Callable[[type], type]
    original: type[nn.Module]
    own: Callable[..., Any]
    ours: Callable[..., Any] | None


def subclass(
    original: type[nn.Module],
    kind: str,
    class_of_copies: Callable[[type], type],
    ours: Callable[..., Any] | None = None,
    **members: Any,
) -> type[nn.Module]:
    """The subclass of `original` with these members. The other arguments are fields of its `Made`."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        if type(self) is not cls:  # a class on top has its own way, or none
            return reduced
        return _copy_of, (class_of_copies, _recipe(original)), *reduced[2:]

    names = ("__module__", "__qualname__", "__doc__")
    members |= {name: getattr(original, name) for name in names}
    members |= {"__reduce_ex__": reduce, MADE: Made(kind, class_of_copies, original, original.forward, ours)}
    cls: type[nn.Module] = type(original.__name__, (original,), members)
    return cls


def made_as(cls: type, kind: str) -> Made | None:
    """How a class, or the first one beneath it, was made as a class of this kind; None if none was."""
    every = (vars(base).get(MADE) for base in cls.__mro__)
    return next((made for made in every if made is not None and made.kind == kind), None)


def class_beneath(module: nn.Module, kind: str) -> type[nn.Module]:
    """The class of a module before one of this kind; a class that somebody put on top stays."""
    made: Made | None = vars(type(module)).get(MADE)
    return type(module) if made is None or made.kind != kind else made.original


def restore_class(module: nn.Module, kind: str) -> None:
    """Gives a module the class before one of this kind; a class that somebody put on top stays."""
    if (beneath := class_beneath(module, kind)) is not type(module):
        module.__class__ = beneath


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class of a module beneath all that `subclass` made; one that was put on top later stays."""
    cls = type(module)
    while MADE in vars(cls):
        cls = vars(cls)[MADE].original
    return cls


def _recipe(cls: type[nn.Module]) -> Any:
    """A class as a pickle names it; generated ones as (factory, recipe of the base)."""
    made: Made | None = vars(cls).get(MADE)
    return cls if made is None else (made.class_of_copies, _recipe(made.original))


def _class_of(recipe: Any) -> type[nn.Module]:
    return recipe if isinstance(recipe, type) else recipe[0](_class_of(recipe[1]))


def _copy_of(class_of_copies: Callable[[type], type], recipe: Any) -> nn.Module:
    cls: Any = class_of_copies(_class_of(recipe))
    return cls.__new__(cls)
