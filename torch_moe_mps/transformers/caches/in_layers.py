"""Caches whose states all lie in their layers: those that can be cut, kept, captured and batched."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from .declared import declaration_of

# Functions of a model's config: the class of ours for a cache that its code insists on, or None.
OWN_CACHES: list[Callable[[Any], Any]] = []


class InLayers(DynamicCache):
    """A cache that has the states of lightning attention in its layers of linear attention.

    transformers' code has them in a list beside the layers, which it reaches by these methods alone.
    """

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)
        layer: Any = self.layers[layer_idx]
        layer.has_previous_state[0] = True


def cache_for(config: Any) -> DynamicCache:
    """An empty cache for a model with this config of text, whose states all lie in its layers."""
    cls: Any = next(filter(None, (own(config) for own in OWN_CACHES)), DynamicCache)
    made: DynamicCache = cls(config=config)
    return made


def is_in_layers(cache: Any) -> bool:
    """True if all states of a cache lie in layers whose classes are declared."""
    is_known = type(cache) is DynamicCache or isinstance(cache, InLayers)
    return is_known and all(declaration_of(type(layer)) is not None for layer in cache.layers)
