"""Subclasses that stand in for the class of a module, which looks and is copied as before."""

from collections.abc import Callable
from typing import Any

from torch import nn


def subclass(
    original: type[nn.Module], new_copy: Callable[[type], nn.Module], **members: Any
) -> type[nn.Module]:
    """The subclass of `original` with these members.

    Args:
        new_copy: gives the empty module, for `original`, that copies and pickles of a module begin with; it
            works without this package's subclass, which they do not name.
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
