"""The arguments of a call: what dictionaries, lists and caches of pages hold has a name of its own."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..attention.causal_mask import range_of_padding

MASK = "attention_mask"


def padding_of(model: Any, arguments: dict[str, Any]) -> tuple[Tensor | None] | None:
    """What `range_of_padding` gives for the mask of padding of a model's call; None where it has none."""
    mask = arguments.get(MASK)
    if type(mask) is not Tensor or mask.dim() != 2:
        return None
    return range_of_padding(mask, mask.shape[1], mask.device, model)


def flat(arguments: dict[str, Any]) -> dict[Any, Any]:
    """Arguments with what dictionaries, lists and caches of pages hold by (name, kind, key)."""
    if not any(type(value) in (dict, list) for value in arguments.values()):
        return arguments
    taken: dict[Any, Any] = {}
    for name, value in arguments.items():
        if type(value) is dict and value:
            taken |= {(name, dict, key): each for key, each in value.items()}
        elif type(value) is list and value:
            taken |= {(name, list, number): each for number, each in enumerate(value)}
        elif type(value).__name__ == "PagedAttentionCache":
            taken[name] = Pages(value)
            taken |= {(name, Pages, key): each for key, each in taken[name].tensors()}
        else:
            taken[name] = value
    return taken


def whole(arguments: dict[Any, Any]) -> dict[str, Any]:
    """The arguments that `flat` has given."""
    made: dict[str, Any] = {}
    tensors: dict[Any, Any] = {}
    for name, value in arguments.items():
        if not isinstance(name, tuple):
            made[name] = value
        elif name[1] is dict:
            made.setdefault(name[0], {})[name[2]] = value
        elif name[1] is list:
            made.setdefault(name[0], []).append(value)
        else:
            tensors[name[2]] = value
    return {name: value.with_(tensors) if isinstance(value, Pages) else value for name, value in made.items()}


class Pages:
    """The cache of continuous batching, compared by what an update of it reads besides its tensors."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.known = (
            type(cache).update,
            *(
                (
                    type(each).update,
                    name,
                    each.index,
                    each.layer_type,
                    each.sentinel_index,
                    *each.layer_indices,
                )
                for name, each in cache.cache_allocators.items()
            ),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pages) and self.known == other.known

    def tensors(self) -> Iterator[tuple[Any, Tensor]]:
        for name, allocator in self._cache.cache_allocators.items():
            for layer, both in allocator._kv_token_views.items():
                for number, view in enumerate(both):
                    yield (name, layer, number), view

    def with_(self, tensors: dict[Any, Tensor]) -> Any:
        """A cache like this one, with other tensors."""
        cache = copy.copy(self._cache)
        copies = {name: copy.copy(each) for name, each in cache.cache_allocators.items()}
        for name, allocator in copies.items():
            layers = allocator._kv_token_views
            allocator._kv_token_views = {
                layer: tuple(tensors[name, layer, number] for number in range(2)) for layer in layers
            }
        cache.cache_allocators = copies
        cache.layer_to_allocator = {i: each for each in copies.values() for i in each.layer_indices}
        return cache

    def forget(self) -> None:
        """Drops what holds the tensors."""
        self._cache = None
