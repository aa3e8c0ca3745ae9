"""Sizes of tensors that eager code may hand to operators, and must not decide by."""

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Decides(Exception):
    """Eager code does something else for other sizes."""


class Decisions(TorchFunctionMode):
    """Within the block, sizes of tensors are numbers that only count: code that compares them raises.

    A computation that is shown for some sizes then holds for all others with as many dimensions.

    Args:
        known: sizes that code may decide by, because every call has the same.

    Attributes:
        were_made: True once code compared a size, also if it caught the error.
    """

    def __init__(self, known: Collection[int] = ()) -> None:
        super().__init__()
        self.known = frozenset(known)
        self.were_made = False

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Size:
            return _Sizes(map(self._size, result))
        if func in _NUMBERS:
            return self._size(result)
        if func is Tensor.__len__:  # `len` gives a plain number
            self.refuse()
        return result

    def run(self, function: Callable, *args: Any, **options: Any) -> Any:
        """The result of eager code. Raises: Decides if it compared a size."""
        with self:
            result = function(*args, **options)
        return self.refuse() if self.were_made else result

    def refuse(self) -> NoReturn:
        self.were_made = True
        raise Decides

    def _size(self, number: int) -> int:
        return number if number in self.known else _Size(number, self)


_NUMBERS = (Tensor.size, Tensor.numel, Tensor.nelement, torch.numel)


class _Sizes(tuple[int, ...]):
    """The shape of a tensor: torch's own class has no subclasses, and its product is a plain number."""

    def numel(self) -> int:
        result = 1
        for size in self:
            result = size * result
        return result


class _Size(int):
    """A number that is one size, or computed from sizes."""

    _decisions: Decisions

    def __new__(cls, number: int, decisions: Decisions) -> "_Size":
        size = super().__new__(cls, number)
        size._decisions = decisions
        return size

    def _decides(self, *_: Any) -> NoReturn:
        self._decisions.refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _decides
    __hash__ = __float__ = __complex__ = __int__ = __round__ = _decides
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = _decides
    __repr__ = __str__ = __format__ = _decides


def _computed(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def run(self: _Size, *others: Any) -> Any:
        if not all(isinstance(other, int) for other in others):
            return self._decides()
        return _Size(compute(self, *others), self._decisions)

    return run


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Size, _method, _computed(_method))
for _method in ("__neg__", "__pos__", "__abs__"):
    setattr(_Size, _method, _computed(_method))
