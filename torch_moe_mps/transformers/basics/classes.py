"""Subclasses that take the place of a module's class: its name and documentation stay, and copies are of the
class itself.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def subclass(
    original: type[nn.Module], new_copy: Callable[[type], nn.Module], **members: Any
) -> type[nn.Module]:
    """The subclass of `original` with these members.

    Args:
        new_copy: makes the empty module that a copy or a pickle begins with, from `original`.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        if type(self) is not cls:  # a class on top has its own way, or none
            return reduced
        return new_copy, (original,), *reduced[2:]

    names = ("__module__", "__qualname__", "__doc__")
    members |= {name: getattr(original, name) for name in names}
    cls: type[nn.Module] = type(original.__name__, (original,), members | {"__reduce_ex__": reduce})
    return cls
