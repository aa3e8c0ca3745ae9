"""Tensors of fixed numbers, made once for each device."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...basics.bounded import Bounded

_held = Bounded(64)


def constant(key: Any, make: Callable[[], Tensor], count: int = 0) -> Tensor:
    """What `make` gives, held by its key as long as it has `count` rows or more.

    A fake tensor, as it is made while a token is captured, is not held.
    """
    found: Tensor | None = _held.get(key)
    if found is None or len(found) < count:
        found = make()
        if type(found) is Tensor:
            _held[key] = found
    return found
