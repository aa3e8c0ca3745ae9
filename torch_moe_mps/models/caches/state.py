"""State that the layers of a cache hold from call to call, by name, as their classes declare it.

Tensors and numbers are attributes of a layer, or lie in dictionaries that are. Whoever copies, saves, counts
or captures a cache asks here. `growing` has the memories that the tensors of a layer are views of.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .declared import SHARED, Axes, declared
from .quantized_states import QuantizedStates

OWN = ""  # the dictionary of a layer's own attributes


class Name(NamedTuple):
    """Place of a value in a layer: an attribute (`OWN`, its name), or a key of a dictionary attribute."""

    dictionary: str
    key: Any


class LayerState:
    """The state of one layer, which stays the layer's own: what changes it changes the layer.

    Raises: ValueError for a layer of a class that is not declared.
    """

    def __init__(self, layer: Any):
        self._held, self._declared = vars(layer), declared(layer)

    @property
    def dictionaries(self) -> list[str]:
        """The names of the attributes that are dictionaries."""
        return [name for name in self._declared.mappings if name in self._held]

    def values(self) -> dict[str, Any]:
        """All attributes, in dictionaries that are copies."""
        attributes, mappings = self._held, self._declared.mappings
        names = (name for name in self._declared.names if name in attributes)
        return {name: dict(attributes[name]) if name in mappings else attributes[name] for name in names}

    def stored(self) -> dict[str, Any]:
        """`values` to write: without the attributes that the others are enough to derive."""
        return {n: value for n, value in self.values().items() if n not in self._declared.derived}

    def items(self) -> Iterator[tuple[Name, Any]]:
        """Names and values, but for the dictionaries themselves."""
        for name, value in self.values().items():
            if name in self._declared.mappings:
                yield from ((Name(name, key), inner) for key, inner in value.items())
            else:
                yield Name(OWN, name), value

    def tensors(self) -> dict[Name, Tensor]:
        return {name: value for name, value in self.items() if isinstance(value, Tensor)}

    def axes(self, name: Name) -> Axes:
        """The dimensions of sequences and of tokens in a tensor."""
        known = self._declared.tensors.get(name.key) if name.dictionary == OWN else None
        return known or self._declared.mappings.get(name.dictionary) or SHARED

    def memory(self) -> int:
        """Bytes of the held tokens, without spare capacity."""
        tensors = chain.from_iterable(map(parts, self.tensors().values()))
        return sum(part.nbytes for part in tensors)

    def put(self, values: Mapping[Name, Any]) -> None:
        """Overwrites these entries of the layer's state."""
        for (dictionary, key), value in values.items():
            (self._held if dictionary == OWN else self._held[dictionary])[key] = value

    def replace(self, values: Mapping[str, Any]) -> None:
        """Gives the layer these attributes, as `values` returns them, and leaves it no others."""
        for name in self._declared.names:
            self._held.pop(name, None)
        self._held.update(values)


def parts(states: Tensor) -> tuple[Tensor, ...]:
    """The tensors that states consist of."""
    return states.parts() if isinstance(states, QuantizedStates) else (states,)


def copy_of_layer(layer: Any, **changed: Any) -> Any:
    """A layer of the same class and state but for some attributes, which shares only tensors with it."""
    copied = object.__new__(type(layer))
    LayerState(copied).replace(LayerState(layer).values() | changed)
    return copied


def copy_of_cache(cache: Any, layers: list[Any]) -> Any:
    """A cache like another one, with layers of its own."""
    copied = copy.copy(cache)
    copied.layers = layers
    return copied


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """{address: bytes} of all memory that some tensors lie in, with the room behind them."""
    plain = chain.from_iterable(map(parts, tensors))
    return {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, plain)}
