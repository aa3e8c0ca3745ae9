"""Caches with all states in layers for models whose code insists on a class of its own."""

import functools
import sys
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

_PLAIN = "__init__", "__len__", "batch_repeat_interleave", "batch_select_indices"


class InLayers(DynamicCache):
    """A cache that has the states of lightning attention in its layers of linear attention.

    transformers' code has them in a list beside the layers, which models reach by these methods alone.
    """

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)
        layer: Any = self.layers[layer_idx]
        layer.has_previous_state[0] = True

    def __reduce__(self) -> Any:
        return _empty, (type(self).__bases__[1],), vars(self)


def _empty(cls: type) -> Any:
    made = _with_layers(cls)
    return made.__new__(made)


def cache_class(model: PreTrainedModel) -> Any:
    """The class of caches for a model whose states all lie in layers; DynamicCache for most."""
    cls: Any = type(model)
    return _class_for(cls)


@functools.cache
def _class_for(model: type) -> Any:
    files = (vars(sys.modules[each.__module__]) for each in model.__mro__)
    classes = (item for file in files for item in file.values() if isinstance(item, type))
    return next((_with_layers(item) for item in classes if _has_list(item)), DynamicCache)


def _has_list(cls: type) -> bool:
    """True for a class of caches with a list of states beside its layers."""
    return issubclass(cls, DynamicCache) and "set_linear_cache" in vars(cls) and cls is not InLayers


@functools.cache
def _with_layers(cls: type) -> Any:
    """A subclass of a model's own class of caches, without the list."""
    plain = {name: getattr(DynamicCache, name) for name in _PLAIN}
    return type(f"{cls.__name__}InLayers", (InLayers, cls), plain)
