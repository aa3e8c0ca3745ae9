"""Tensors that stand for elements which are made when somebody reads them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Deferred(Tensor):
    """A tensor without memory of its own. Whatever does not know its class gets its elements."""

    @classmethod
    def made(cls, shape: tuple[int, ...], dtype: torch.dtype, device: Any, **attributes: Any) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(made).update(attributes)
        return made

    def elements(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator that needs no elements; NotImplemented if it needs them."""
        return NotImplemented

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch: not typed as a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = cls.without_elements(func, args, kwargs)
        if known is not NotImplemented:
            return known
        args, kwargs = tree_map_only(Deferred, lambda item: item.elements(), (args, kwargs))
        return func(*args, **kwargs)
