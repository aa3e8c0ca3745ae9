"""Where a cache has its states, and what of it stays from call to call."""

from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor

from ..caches.cache import QuantizedCache
from ..caches.declared import declaration_of, is_in_layers
from ..caches.separate import Separate
from ..caches.state import copy_of_cache, copy_of_layer, dictionaries_of, parts
from ..upstream.models import GROWING

_CACHES = (*GROWING, QuantizedCache)


def all_parts(states: tuple[Tensor, ...]) -> list[Tensor]:
    if all(map(is_, map(type, states), repeat(Tensor))):
        return [*states]  # the common case, without a call for each
    return [*chain.from_iterable(map(parts, states))]


def static_of(cache: Any) -> dict[str, Any]:
    """The class and the attributes of a cache; of its layers how many there are."""
    return {**vars(cache), "layers": len(cache.layers), "__class__": type(cache)}


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; a layer that each sequence has for itself counts once a sequence."""
    layers = getattr(cache, "layers", [])  # None has none
    if not any(type(layer) is Separate for layer in layers):
        return layers
    return [one for layer in layers for one in (layer.layers if type(layer) is Separate else (layer,))]


def is_known(cache: Any) -> bool:
    """True if a cache, and all of its layers, are of classes whose states are known."""
    if not all(declaration_of(type(layer)) is not None for layer in layers_of(cache)):
        return False
    return type(cache) in _CACHES or is_in_layers(cache)


def slots_of(cache: Any, layers: list[tuple[type, list[str]]]) -> list[Any]:
    """Dictionaries with all that may change from call to call, in the order of all who read them.

    Args:
        cache: None for a call without one.
        layers: (class, names of the attributes that are dictionaries) of each layer.

    Returns: for each layer its attributes and its dictionaries.
    """
    slots: list[Any] = []
    for layer, (_, names) in zip(layers_of(cache), layers, strict=True):
        slots += dictionaries_of(layer, names)
    return slots


def empty_copy(cache: Any) -> Any:
    """A cache with layers like another one's, which share nothing that changes."""
    return copy_of_cache(cache, [*map(_copy, cache.layers)])


def _copy(layer: Any) -> Any:
    return Separate(map(copy_of_layer, layer.layers)) if type(layer) is Separate else copy_of_layer(layer)
