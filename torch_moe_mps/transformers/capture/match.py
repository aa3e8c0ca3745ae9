"""Takes calls like a recorded one apart in microseconds, and puts what they have made into their cache."""

from collections.abc import Callable
from itertools import repeat
from operator import is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ..basics.logits import are_wide
from ..caches.buffer import Buffer, buffer_of, start_of
from .arguments import MASK
from .caches import all_parts, layers_of, slots_of, static_of
from .reading import HELD, NUMBER, STATIC, TENSOR, Entry
from .surroundings import default_device

SIZE, TOKENS, START = range(4, 7)  # beside NUMBER what a symbol is read from
_NUMBERS = "numbers that were equal in the captured call differ"


class Taken(NamedTuple):
    """A call's tensors and numbers."""

    inputs: list[Tensor]
    views: list[Tensor]
    buffers: tuple[Buffer, ...]
    slots: list[Any]
    symbols: list[int]
    cache: Any


class Slots:
    """Entries that the slots of a cache have in every call, read in one go."""

    def __init__(self, entries: list[list[Entry]], sizes: list[int], symbol: dict[int, int]) -> None:
        self._sizes = sizes
        self._getters = [getter([entry.name for entry in own]) for own in entries]
        every = [entry for own in entries for entry in own]
        changing = {n: symbol[e.first] for n, e in enumerate(every) if e.kind == NUMBER and e.first in symbol}
        static = [n for n, e in enumerate(every) if e.kind in (STATIC, NUMBER) and n not in changing]
        self._static, self._known = getter(static), tuple(every[n].value for n in static)
        self.numbers, self.symbols = getter([*changing]), getter([*changing.values()])
        self.tensors = getter([n for n, entry in enumerate(every) if entry.kind == TENSOR])
        self.held = getter([n for n, entry in enumerate(every) if entry.kind == HELD])

    def read(self, slots: list[Any]) -> list[Any] | None:
        """All values; None if a constant one has changed."""
        if list(map(len, slots)) != self._sizes:
            return None
        values = [value for get, held in zip(self._getters, slots, strict=True) for value in get(held)]
        return values if self._static(values) == self._known else None


class Write(NamedTuple):
    """A value that a call gives its cache: `value` is its place among results or integers."""

    name: Any
    kind: int
    value: Any
    buffer: int | None = None  # the number of the one that a tensor is a view of
    end: int | None = None  # its written end, among the integers


class Buffers(NamedTuple):
    """Buffers that the values of a call are views of, and how far each is written.

    Attributes:
        ends: for each kind of end: (start, its symbol, length, its symbol), the symbol -1 for none.
        ends_of: gives the end of each buffer, from those.
        of_values: gives the buffer of each view.
        first_of: gives each buffer once.
    """

    ends: list[tuple[int, ...]]
    ends_of: Callable[[Any], tuple[Any, ...]]
    of_values: Callable[[Any], tuple[Any, ...]]
    first_of: Callable[[Any], tuple[Any, ...]]

    def shown(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Each buffer of these values once; None where others share one."""
        every = [*map(buffer_of, values)]
        buffers = self.first_of(every)
        return None if any(map(is_not, every, self.of_values(buffers))) else buffers

    def are_at_their_ends(self, buffers: tuple[Buffer, ...], symbols: list[int]) -> bool:
        """True if nobody has written behind what a call with these numbers shows of them."""
        ends = [
            (start if first < 0 else symbols[first]) + (tokens if count < 0 else symbols[count])
            for start, first, tokens, count in self.ends
        ]
        return tuple([buffer.end for buffer in buffers]) == self.ends_of(ends)


class Match(NamedTuple):
    """Contents of calls like a recorded one, and where they are.

    Attributes:
        around: the default device, and whether logits are wide.
        padding: True if `padding_of` gives keys; None if it is not asked.
        arguments: (name, kind, value) of all but the cache.
        cache: its name; None for a call without one.
        attributes: what of the cache stays.
        layers: (class, names of dictionaries) of each layer of the cache.
        slots: what the cache holds.
        readers: for each symbol the kind, the number and the place of its source.
        buffers: that the slots show.
        writes: for each slot what a call writes there.
    """

    around: tuple[torch.device | None, bool]
    padding: bool | None
    arguments: list[tuple[Any, int, Any]]
    cache: str | None
    attributes: dict[str, Any]
    layers: list[tuple[type, list[str]]]
    slots: Slots
    readers: list[tuple[int, int, Any]]
    buffers: Buffers
    writes: list[list[Write]]

    def take(self, arguments: dict[str, Any], padding: Callable[[], Any]) -> Taken | str:
        """A call like the recorded one, as far as Python can tell; for another one what differs.

        `padding` gives what `padding_of` gives for the call.
        """
        inputs: list[Tensor] = []
        differs = self._around(arguments) or self._passed(arguments, padding, inputs)
        differs = differs or self._kinds(arguments)
        if differs is not None:
            return differs
        cache = None if self.cache is None else arguments[self.cache]
        slots = slots_of(cache, self.layers)
        values = self.slots.read(slots)
        if values is None:
            return "the cache has other attributes"
        held = self.slots.held(values)
        buffers = self.buffers.shown(held)
        if buffers is None:
            return "the layers of the cache share other buffers"
        inputs += all_parts(self.slots.tensors(values) + tuple([buffer.tensor for buffer in buffers]))
        views = all_parts(held)
        if any(map(is_not, map(type, inputs), repeat(Tensor))):
            return "a tensor is of another class"
        symbols = self._symbols(inputs, views, slots)
        differs = self._counts(values, symbols, buffers)
        return Taken(inputs, views, buffers, slots, symbols, cache) if differs is None else differs

    def _around(self, arguments: dict[Any, Any]) -> str | None:
        if len(arguments) != len(self.arguments) + (self.cache is not None):
            return "it has other arguments"
        if default_device() != self.around[0]:
            return "the default device is another one"
        if are_wide() != self.around[1]:
            return "its logits have another dtype"
        return None

    def _passed(
        self, arguments: dict[Any, Any], padding: Callable[[], Any], inputs: list[Tensor]
    ) -> str | None:
        """Adds the tensors among the arguments to `inputs`."""
        for name, kind, value in self.arguments:
            passed = arguments.get(name)
            if kind == TENSOR:
                inputs.append(passed)  # type: ignore[arg-type]  # its type is compared later
                if name == MASK and self.padding is not None:
                    keys = padding()
                    if keys is None or (keys[0] is not None) != self.padding:
                        return "its padding is of another kind"
                    inputs += keys if self.padding else ()
            elif passed is not value and (type(passed) is not type(value) or passed != value):
                return f"{name} is another one"
        return None

    def _kinds(self, arguments: dict[Any, Any]) -> str | None:
        if self.cache is not None:
            cache = arguments.get(self.cache)
            if not isinstance(cache, Cache) or static_of(cache) != self.attributes:
                return "the cache is of another kind"
            if list(map(type, layers_of(cache))) != [known for known, _ in self.layers]:
                return "the cache has other layers"
        return None

    def _symbols(self, inputs: list[Tensor], views: list[Tensor], slots: list[Any]) -> list[int]:
        symbols: list[int] = []
        for kind, number, where in self.readers:
            if kind == SIZE:
                symbols.append(inputs[number].shape[where])
            elif kind == TOKENS:
                symbols.append(views[number].shape[-2])
            elif kind == START:
                symbols.append(start_of(views[number]))
            else:
                symbols.append(slots[number][where])
        return symbols

    def _counts(self, values: list[Any], symbols: list[int], buffers: tuple[Buffer, ...]) -> str | None:
        if self.slots.numbers(values) != self.slots.symbols(symbols):
            return _NUMBERS
        if not self.buffers.are_at_their_ends(buffers, symbols):
            return "somebody else has written behind the cache's last token"
        return None

    def give(self, taken: Taken, results: list[Tensor], integers: list[int]) -> None:
        """Puts what a call has made into its cache."""
        for held, writes in zip(taken.slots, self.writes, strict=True):
            for name, kind, value, number, end in writes:
                if kind == NUMBER:
                    held[name] = integers[value]
                elif kind == STATIC:
                    held[name] = value
                else:
                    cls, first, count = value
                    states = results[first] if count == 1 else cls(*results[first : first + count])
                    if number is not None:
                        buffer = taken.buffers[number]
                        buffer.attach(states)
                        buffer.end = integers[end]  # type: ignore[index]  # it has one
                    held[name] = states


def getter(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these names."""
    if not names:
        return lambda held: ()
    if len(names) == 1:
        return lambda held: (held[names[0]],)
    return itemgetter(*names)
