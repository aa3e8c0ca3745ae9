"""Values that are made once: fixed numbers on each device, and results from tensors that all layers get."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...basics.bounded import Bounded

_held = Bounded(64)


def constant(key: Any, make: Callable[[], Tensor], count: int = 0) -> Tensor:
    """Result of `make`, held by its key as long as it has `count` rows or more.

    A fake tensor, made while a token is captured, is not held.
    """
    result: Tensor | None = _held.get(key)
    if result is None or len(result) < count:
        result = make()
        if type(result) is Tensor:
            _held[key] = result
    return result


def beside(tensor: Tensor, name: str, make: Callable[[], Any]) -> Any:
    """Result of `make`, kept as an attribute of this name of a tensor that all layers get."""
    result = getattr(tensor, name, None)
    if result is None:
        result = make()
        if not torch.compiler.is_compiling():
            setattr(tensor, name, result)
    return result
