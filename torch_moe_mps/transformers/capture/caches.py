"""Where a cache has its states, and what of it stays from call to call."""

from collections.abc import Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from ..attention.causal_mask import CausalMask
from ..caches.cache import QuantizedCache
from ..caches.state import attributes_of, copy_of_cache, copy_of_layer, dictionaries_of, parts

_CACHES = (DynamicCache, StaticCache, QuantizedCache)


def all_parts(states: tuple[Tensor, ...]) -> list[Tensor]:
    if all(map(is_, map(type, states), repeat(Tensor))):
        return [*states]  # the common case, without a call for each
    return [*chain.from_iterable(map(parts, states))]


def start_of(view: Tensor, memory: Tensor) -> int:
    """The token of a memory that a view begins with."""
    return (view.storage_offset() - memory.storage_offset()) // memory.stride(-2)


def column_of(view: Tensor, memory: Tensor) -> int:
    """The column of a memory that a view begins with."""
    within = view.storage_offset() - memory.storage_offset()
    return int(within % memory.stride(-2)) if within else 0


def static_of(cache: Any) -> dict[str, Any]:
    """The class and the attributes of a cache; of its layers and of lists how many there are."""
    own = {name: len(value) if type(value) is list else value for name, value in attributes_of(cache).items()}
    return own | {"__class__": type(cache)}


def is_known(cache: Cache) -> bool:
    is_of_a_model = isinstance(cache, DynamicCache) and type(cache).__module__.startswith(
        "transformers.models."
    )
    return type(cache) in _CACHES or is_of_a_model


def lists_of(cache: Cache) -> list[list[Any]]:
    """States that a model's own cache holds beside its layers."""
    return [
        value for value in attributes_of(cache).values() if type(value) is list and value is not cache.layers
    ]


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(held) if type(held) is list else held.items()


def kind_of(mask: CausalMask) -> tuple[Any, ...]:
    return CausalMask, mask.shape, mask.dtype, mask.device, mask.lookahead


def places_of(cache: Any, known: list[tuple[type, list[str]]]) -> list[Any]:
    """The dictionaries that the layers of a cache hold what they hold in, and the cache's lists."""
    places = []
    for layer, (_, names) in zip(cache.layers, known, strict=True):
        places += dictionaries_of(layer, names)
    return places + lists_of(cache)


def empty_copy(cache: Any) -> Any:
    """A cache with layers like those of another one, which share nothing that changes."""
    return copy_of_cache(cache, [copy_of_layer(layer) for layer in cache.layers])
