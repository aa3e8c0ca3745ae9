"""What rewritten forwards call, as `_moe_mps.name`: the functions of rules that are marked with `called`."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable)


def called(function: Function) -> Function:
    """Lets rewritten forwards call a function by its name."""
    globals()[function.__name__] = function
    return function


def first_of(out: Any) -> Any:
    """The first of several results."""
    if not isinstance(out, tuple):
        return out
    first, _ = out
    return first
