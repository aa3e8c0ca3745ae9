"""Binds calls to a program in microseconds, and writes what they have computed into their cache.

Objects of Python are compared here: which arguments a call has, and what of its cache stays. Program.bind of
csrc/program.mm compares the tensors and numbers, and the model's weights.
"""

from collections.abc import Callable
from itertools import chain, repeat
from operator import is_, is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ..basics.logits import are_wide
from ..caches.buffer import BUFFER, Buffer, shown_buffer
from ..caches.separate import Separate
from ..caches.state import parts
from ..caches.tiled import TiledLayer
from ..graphs.tracing import LeftAlone, NotCapturable
from ..upstream.models import ModelOutput
from .surroundings import default_device

MASK = "attention_mask"
ARGUMENTS = -1  # the place of what is no dictionary of the cache
STATIC, NUMBER, TENSOR, VIEW = range(4)  # kinds of values; a view is one of a buffer


class Entry(NamedTuple):
    """A value of a call: `place` is a dictionary of the cache, by its number, or ARGUMENTS."""

    place: int
    name: Any
    kind: int
    value: Any
    first: int  # the place of its numbers


class CacheEntries:
    """Entries of a cache's dictionaries and lists that a call reads, in one go.

    Attributes:
        symbols: of the numbers, in their order.
        numbers, tensors, views: give the values of a kind from all values.
    """

    def __init__(self, entries: list[list[Entry]], sizes: list[int], symbol: dict[int, int]) -> None:
        self._sizes = sizes
        self._getters = [getter([entry.name for entry in of_container]) for of_container in entries]
        every = [*chain.from_iterable(entries)]
        changing = {n: symbol[e.first] for n, e in enumerate(every) if e.kind == NUMBER and e.first in symbol}
        static = [n for n, e in enumerate(every) if e.kind in (STATIC, NUMBER) and n not in changing]
        self._static, self._known = getter(static), tuple(every[n].value for n in static)
        self.numbers, self.symbols = getter([*changing]), [*changing.values()]
        self.tensors = getter([n for n, entry in enumerate(every) if entry.kind == TENSOR])
        self.views = getter([n for n, entry in enumerate(every) if entry.kind == VIEW])

    def read(self, containers: list[Any]) -> list[Any] | None:
        """All values; None if a constant one has changed."""
        if list(map(len, containers)) != self._sizes:
            return None
        pairs = zip(self._getters, containers, strict=True)
        values = [value for get, container in pairs for value in get(container)]
        return values if self._static(values) == self._known else None


class Write(NamedTuple):
    """A value that a call writes into its cache: `value` is its place among results or integers."""

    name: Any
    kind: int
    value: Any
    buffer: int | None = None  # the number of the one that a tensor is a view of
    end: int | None = None  # its written end, among the integers


class Buffers(NamedTuple):
    """Indices of the views of a cache that share a buffer.

    Attributes:
        first_of: gives each buffer once, from the buffers of all views.
        of_views: gives the buffer of each view, from these.
    """

    first_of: Callable[[Any], tuple[Any, ...]]
    of_views: Callable[[Any], tuple[Any, ...]]

    def shown(self, views: tuple[Any, ...]) -> tuple[Buffer, ...] | None:
        """Each buffer of these views once; None where others share one."""
        every = [*map(shown_buffer, views)]
        buffers = self.first_of(every)
        return None if any(map(is_not, every, self.of_views(buffers))) else buffers


class Bound(NamedTuple):
    """A call that is bound to a program, and where its cache has what the call writes."""

    call: Any  # a bound call of csrc/program.mm
    containers: list[Any]
    buffers: tuple[Buffer, ...]
    cache: Any

    def run(self, arriving: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The results and the integers of the call; no results where other tensors arrive than did."""
        results, integers = self.call.run(arriving)
        return results, integers


# Makes what a call returns, from its tensors and its cache.
Make = Callable[[list[Tensor], Any], Any]


def maker(value: Any, tensors: list[Tensor], cache: Any) -> Make:
    """A function that makes what a call returns, like `value`; adds the tensors in it to `tensors`.

    Raises: NotCapturable for a value that cannot be made from tensors and a cache.
    """
    if isinstance(value, Tensor):
        place = len(tensors)
        tensors.append(value)
        return lambda results, _: results[place]
    if value is not None and value is cache:
        return lambda _, passed: passed
    if isinstance(value, ModelOutput):
        cls, makers = type(value), {name: maker(item, tensors, cache) for name, item in value.items()}
        return lambda results, passed: cls(**{name: make(results, passed) for name, make in makers.items()})
    if type(value) in (tuple, list):
        kind, items = type(value), [maker(item, tensors, cache) for item in value]
        return lambda results, passed: kind([make(results, passed) for make in items])
    if value is None or isinstance(value, (bool, int, float, str)):
        return lambda *_: value
    if isinstance(value, Cache):
        raise LeftAlone("it makes a cache")
    raise NotCapturable(f"it returns a {type(value).__name__}")


class Match(NamedTuple):
    """Contents of calls like a recorded one, and where they are.

    Attributes:
        program: torch.classes.moe_mps.Program.
        around: the default device, and whether logits are wide.
        padding: True if `padding_of` gives keys; None if it is not asked.
        arguments: (name, kind, value) of all but the cache.
        cache: its name; None for a call without one.
        attributes: what of the cache stays.
        layers: (class, names of dictionaries) of each layer of the cache.
        entries: what a call reads of the cache's dictionaries and lists, its containers.
        buffers: that the containers show.
        writes: for each container what a call writes there.
    """

    program: Any
    around: tuple[torch.device | None, bool]
    padding: bool | None
    arguments: list[tuple[Any, int, Any]]
    cache: str | None
    attributes: dict[str, Any]
    layers: list[tuple[type, list[str]]]
    entries: CacheEntries
    buffers: Buffers
    writes: list[list[Write]]

    def bind(
        self, arguments: dict[str, Any], padding: Callable[[], Any], on_copies: bool = False
    ) -> Bound | str:
        """A call like the recorded one, bound to the program; for another one what differs.

        Args:
            padding: gives what `padding_of` gives for the call.
            on_copies: binds copies of all states. Of a buffer a program writes only spare capacity, which the
                model's forward writes again.
        """
        inputs: list[Tensor] = []
        differs = self._around(arguments) or self._passed(arguments, padding, inputs)
        differs = differs or self._kinds(arguments)
        if differs is not None:
            return differs
        cache = None if self.cache is None else arguments[self.cache]
        containers = containers_of(cache, self.layers)
        values = self.entries.read(containers)
        if values is None:
            return "the cache has other attributes"
        views = self.entries.views(values)
        buffers = self.buffers.shown(views)
        if buffers is None:
            return "the layers of the cache share other buffers"
        states = all_parts(self.entries.tensors(values))
        inputs += [state.clone() for state in states] if on_copies else states
        inputs += all_parts(tuple([buffer.tensor for buffer in buffers]))
        if any(map(is_not, map(type, inputs), repeat(Tensor))):
            return "a tensor is of another class"
        ends = [buffer.end for buffer in buffers]
        call = self.program.bind(inputs, all_parts(views), [*self.entries.numbers(values)], ends)
        return call if isinstance(call, str) else Bound(call, containers, buffers, cache)

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
        """Difference of the arguments from the recorded ones, or None; adds their tensors to `inputs`."""
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

    def write_back(self, bound: Bound, results: list[Tensor], integers: list[int]) -> None:
        """Writes what a call has computed into its cache."""
        for container, writes in zip(bound.containers, self.writes, strict=True):
            for name, kind, value, number, end in writes:
                if kind == NUMBER:
                    container[name] = integers[value]
                elif kind == STATIC:
                    container[name] = value
                else:
                    cls, first, count = value
                    states = results[first] if count == 1 else cls(*results[first : first + count])
                    if number is not None:
                        buffer = bound.buffers[number]
                        setattr(states, BUFFER, buffer)
                        buffer.end = integers[end]  # type: ignore[index]  # it has one
                    container[name] = states


def getter(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these names."""
    if not names:
        return lambda values: ()
    if len(names) == 1:
        return lambda values: (values[names[0]],)
    return itemgetter(*names)


def all_parts(states: tuple[Tensor, ...]) -> list[Tensor]:
    if all(map(is_, map(type, states), repeat(Tensor))):
        return [*states]  # the common case, without a call for each
    return [*chain.from_iterable(map(parts, states))]


def settle_caches(arguments: dict[str, Any]) -> None:
    """Lets the layers of tiles in a call's cache do first what no program does. They grow alike."""
    cache = next((value for value in arguments.values() if isinstance(value, Cache)), None)
    for layer in getattr(cache, "layers", ()):
        rows = layer.layers if type(layer) is Separate else (layer,)
        if not isinstance(rows[0], TiledLayer):
            continue
        ids = arguments.get("input_ids")
        tokens = (arguments["inputs_embeds"] if ids is None else ids).shape[1]
        unsettled = [row for row in rows if not row.is_settled(tokens)]
        if not unsettled:
            return
        for row in unsettled:
            row.settle(tokens)


def static_of(cache: Any) -> dict[str, Any]:
    """The class and the attributes of a cache; of its layers how many there are."""
    return {**vars(cache), "layers": len(cache.layers), "__class__": type(cache)}


def layers_of(cache: Any) -> list[Any]:
    """The layers of a cache; a layer that each sequence has for itself counts once a sequence."""
    layers = getattr(cache, "layers", [])  # None has none
    if not any(type(layer) is Separate for layer in layers):
        return layers
    return [one for layer in layers for one in (layer.layers if type(layer) is Separate else (layer,))]


def containers_of(cache: Any, layers: list[tuple[type, list[str]]]) -> list[Any]:
    """Dictionaries with all that may change from call to call, in the order of all who read them.

    Args:
        cache: None for a call without one.
        layers: (class, names of the attributes that are dictionaries) of each layer.

    Returns: for each layer its attributes and its dictionaries.
    """
    containers: list[Any] = []
    for layer, (_, names) in zip(layers_of(cache), layers, strict=True):
        attributes = vars(layer)
        containers += [attributes, *[attributes[name] for name in names]]
    return containers
