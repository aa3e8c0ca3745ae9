"""Where a cache has its states, and what of it stays from call to call.

RWKV's cache is a list of tensors, which it writes in place and gives back.
"""

from collections.abc import Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor
from transformers import Cache, StaticCache

from ..attention.causal_mask import CausalMask
from ..caches.cache import STATES, QuantizedCache
from ..caches.declared import declaration_of, lists_of
from ..caches.in_layers import is_in_layers
from ..caches.separate import Separate
from ..caches.state import copy_of_cache, copy_of_layer, dictionaries_of, parts
from ..upstream.models import GROWING

_CACHES = (*GROWING, StaticCache, QuantizedCache)


def all_parts(states: tuple[Tensor, ...]) -> list[Tensor]:
    if all(map(is_, map(type, states), repeat(Tensor))):
        return [*states]  # the common case, without a call for each
    return [*chain.from_iterable(map(parts, states))]


def static_of(cache: Any) -> dict[str, Any]:
    """The class and the attributes of a cache; of its layers and of states in lists how many there are."""
    if type(cache) is list:
        return {"__class__": list}
    sizes = {name: len(states) for name, states in lists_of(cache).items()}
    return {**vars(cache), **sizes, "layers": len(cache.layers), "__class__": type(cache)}


def is_cache(name: Any, value: Any) -> bool:
    """True if an argument of this name is a cache."""
    return isinstance(value, Cache) or (name == STATES and type(value) is list)


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; a layer that each sequence has for itself counts once a sequence."""
    layers = getattr(cache, "layers", [])  # neither a list nor None has some
    if not any(type(layer) is Separate for layer in layers):
        return layers
    return [one for layer in layers for one in (layer.layers if type(layer) is Separate else (layer,))]


def is_known(cache: Any) -> bool:
    """True if a cache, and all of its layers, are of classes whose states are known."""
    if not all(declaration_of(type(layer)) is not None for layer in layers_of(cache)):
        return False
    if type(cache) is list:
        return all(type(states) is Tensor for states in cache)
    return type(cache) in _CACHES or is_in_layers(cache) or bool(lists_of(cache))


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(held) if type(held) is list else held.items()


def kind_of(mask: CausalMask) -> tuple[Any, ...]:
    return CausalMask, mask.shape, mask.dtype, mask.device, mask.lookahead


def slots_of(cache: Any, layers: list[tuple[type, list[str]]], masks: list[CausalMask]) -> list[Any]:
    """Dictionaries and lists with all that may change from call to call, in the order of all who read them.

    Args:
        cache: None for a call without one.
        layers: (class, names of the attributes that are dictionaries) of each layer.

    Returns: for each layer its attributes and its dictionaries; the cache's own lists; the masks' orders.
    """
    slots: list[Any] = []
    for layer, (_, names) in zip(layers_of(cache), layers, strict=True):
        slots += dictionaries_of(layer, names)
    slots += [cache] if type(cache) is list else lists_of(cache).values()
    return slots + [mask.order for mask in masks]


def empty_copy(cache: Any) -> Any:
    """A cache with layers like another one's, which share nothing that changes."""
    if type(cache) is list:
        return [*cache]
    return copy_of_cache(cache, [*map(_copy, cache.layers)])


def _copy(layer: Any) -> Any:
    return Separate(map(copy_of_layer, layer.layers)) if type(layer) is Separate else copy_of_layer(layer)
