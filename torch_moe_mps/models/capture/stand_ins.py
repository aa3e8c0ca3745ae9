"""Stand-ins of a recorded call's arguments and cache, and where calls like it have the values."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..basics.logits import are_wide
from ..basics.tensors import notes_on
from ..caches.buffer import Buffer, buffer_of, column_of, start_of
from ..caches.quantized_states import QuantizedStates
from ..caches.separate import Separate
from ..caches.state import LayerState, copy_of_cache, copy_of_layer, parts
from ..graphs.tracing import NotCapturable, Recorder
from .match import (
    ARGUMENTS,
    MASK,
    NUMBER,
    STATIC,
    TENSOR,
    VIEW,
    Buffers,
    CacheEntries,
    Entry,
    Match,
    Write,
    containers_of,
    getter,
    layers_of,
    static_of,
)
from .reading import STATIC_TYPES, Reading
from .surroundings import default_device


class _Numbers:
    """Numbers of a call: symbols of the recording, and constants.

    Args:
        symbol: {position of a number: its symbol}.
        symints: stand for symbols in the recording.
    """

    def __init__(self, symbol: dict[int, int], symints: list[Any]):
        self.symbol, self._symints = symbol, symints

    def of(self, position: int, value: int) -> Any:
        """The number at a position, in the recording."""
        symbol = self.symbol.get(position)
        return value if symbol is None else self._symints[symbol]


class _Buffers:
    """The buffers that values of the recorded call show, in their order.

    Attributes:
        views: for each buffer the number of a view that shows it up to its end.
    """

    def __init__(self) -> None:
        self.views: list[int] = []
        self._known: dict[int, tuple[int, Any, int]] = {}  # by id: number, stand-in, its first input
        self._of_values: list[int] = []

    def of(self, real: Any, view: int, add: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        """(stand-in of a buffer, its first input); `add` makes them for a new buffer, which `view` shows."""
        if id(real) not in self._known:
            self._known[id(real)] = len(self._known), *add()
            self.views.append(view)
        number, stand_in, source = self._known[id(real)]
        self._of_values.append(number)
        return stand_in, source

    def number_of(self, stand_in: Any) -> int | None:
        return next((number for number, item, _ in self._known.values() if item is stand_in), None)

    def match(self) -> Buffers:
        return Buffers(
            first_of=getter([self._of_values.index(number) for number in range(len(self.views))]),
            of_views=getter(self._of_values),
        )


class _Cache:
    """The cache of the recorded call, and its stand-in.

    Attributes:
        name: of the argument; None for a call without one.
        attributes, layers: as `Match` has them.
        before: contents of the stand-in's containers at the start of the recording.
    """

    def __init__(self, name: str | None = None, value: Any = None):
        self.name, self.stand_in = name, None if name is None else _empty_copy(value)
        self.attributes: dict[str, Any] = {} if name is None else static_of(value)
        layers = layers_of(self.stand_in)
        self.layers = [(type(layer), LayerState(layer).dictionaries) for layer in layers]
        self.before: list[dict[Any, Any]] = []

    def containers(self) -> list[Any]:
        return containers_of(self.stand_in, self.layers)

    def changed(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """The contents of each container before the call, and behind it.

        Raises: NotCapturable where there are other ones, or attributes.
        """
        if self.name is None:
            return []
        if static_of(self.stand_in) != self.attributes:
            raise NotCapturable("the call changes its cache's attributes")
        for layer, (_, names) in zip(layers_of(self.stand_in), self.layers, strict=True):
            if not {*LayerState(layer).dictionaries} >= set(names):
                raise NotCapturable("the call takes attributes from a layer of its cache")
        pairs = [*zip(self.before, map(dict, self.containers()), strict=True)]
        if any(before.keys() != after.keys() for before, after in pairs):
            raise NotCapturable("the call gives a layer of its cache attributes")
        return pairs


class StandIns:
    """Stand-ins for what a call has, and what was read of it. They are dropped once the program is made.

    Attributes:
        arguments: of the recorded call, by name.
        inputs: for each input a tensor like it, and {dimension: symbol} where its size is one.
        arriving: tensors like the ones that come from another process, the last inputs.
        views: for each view what `add_view` of a program takes.
        of_buffers: numbers of the inputs that are buffers.
    """

    def __init__(
        self, reading: Reading, symbol: dict[int, int], symints: list[Any], recorder: Recorder
    ) -> None:
        """`symbol`: {position of a number: its symbol}; `symints` stand for symbols in the recording."""
        self.arguments: dict[Any, Any] = {}
        self.inputs: list[tuple[Tensor, dict[int, int]]] = []
        self.arriving: list[Tensor] = []
        self.views: list[tuple[int, ...]] = []
        self.of_buffers: set[int] = set()
        self._numbers, self._recorder = _Numbers(symbol, symints), recorder
        self._around = default_device(), are_wide()
        self._padding = reading.padding
        self._mask: Any = None  # stands for the mask of padding
        self._cache, self._buffers = _Cache(), _Buffers()
        self._known: list[tuple[Any, int, Any]] = []  # arguments, as `Match` has them
        for entry in reading.entries:
            if entry.place == ARGUMENTS:
                self._add_argument(entry)
        self._add_containers(reading)

    def _add_argument(self, entry: Entry) -> None:
        """Adds the stand-in of an argument: of the cache, of a tensor, or of a mask as a padding mask."""
        _, name, kind, value, first = entry
        if isinstance(value, Cache):
            self._cache = _Cache(name, value)
            self.arguments[name] = self._cache.stand_in
            return
        self._known.append((name, kind, value))
        if name != MASK or self._padding is None:
            self.arguments[name] = self._input(value, first) if kind == TENSOR else value
            return
        # Whoever asks for bool gets it as it is, with its range.
        self._mask = self.arguments[name] = self._input(value, first, torch.bool)
        (keys,) = self._padding
        notes_on(self._mask).key_range = (None if keys is None else self._of_rows(keys, first),)

    def _add_containers(self, reading: Reading) -> None:
        entries: dict[int, list[Entry]] = {}
        for entry in reading.entries:
            entries.setdefault(entry.place, []).append(entry)
        containers = self._cache.containers()
        of_container = [entries.get(place, []) for place in range(len(containers))]
        self._entries = CacheEntries(of_container, list(map(len, containers)), self._numbers.symbol)
        # Tensors, then views, as `bind` does.
        for entry in sorted(chain(*of_container), key=lambda entry: entry.kind):
            containers[entry.place][entry.name] = self._stand_in(entry)
        self._cache.before = [*map(dict, containers)]

    def _stand_in(self, entry: Entry) -> Any:
        """The stand-in of an entry: a fake tensor, a symbol, a view of a fake buffer, or the static value."""
        _, _, kind, value, first = entry
        if kind == STATIC:
            return value
        if kind == NUMBER:
            return self._numbers.of(first, value)
        if kind == TENSOR:
            return self._inputs(value, first)
        real, number_of = buffer_of(value), self._numbers
        assert real is not None
        known = len(self._buffers.views)
        stand_in, source = self._buffers.of(real, len(self.views), lambda: self._buffer(real, first))
        views = []
        for view, tensor, fake in zip(parts(value), parts(real.tensor), parts(stand_in.tensor), strict=True):
            first += tensor.dim() + 2
            begins, column = start_of(view), column_of(view)
            tokens = number_of.of(first - 2, view.shape[-2])
            start = number_of.of(first - 1, begins)
            symbols = [number_of.symbol.get(position, -1) for position in (first - 1, first - 2)]
            place = (begins, symbols[0], view.shape[-2], symbols[1])
            self.views.append((source, *place, column, view.shape[-1]))
            views.append(self._recorder.run(_narrow(fake, start, tokens, column, view.shape[-1])))
            source += 1
        if len(self._buffers.views) > known:
            stand_in.end = start + tokens
        return stand_in.attach(_like(value, views))

    def _buffer(self, real: Buffer, first: int) -> tuple[Buffer, int]:
        """The stand-in of a buffer, and the number of its first input."""
        source = len(self.inputs)
        stand_in = Buffer(self._inputs(real.tensor, first, beside=2))  # a view has two numbers more
        self.of_buffers.update(range(source, len(self.inputs)))
        return stand_in, source

    def _inputs(self, value: Any, first: int, beside: int = 0) -> Any:
        """The next inputs, for the parts of a value, whose numbers begin at `first`."""
        fakes = []
        for tensor in parts(value):
            fakes.append(self._input(tensor, first))
            first += tensor.dim() + beside
        return _like(value, fakes)

    def add_arriving(self, tensor: Tensor) -> Tensor:
        """The next input, like a tensor from another process, with the sizes of every call."""
        self.arriving.append(tensor)
        return self._recorder.input(tensor, tensor.shape)

    def _of_rows(self, tensor: Tensor, first: int) -> Tensor:
        """The next input, with as many rows as the one whose numbers begin at `first`."""
        symbol = self._numbers.symbol.get(first)
        self.inputs.append((tensor, {} if symbol is None else {0: symbol}))
        return self._recorder.input(tensor, (self._numbers.of(first, tensor.shape[0]), *tensor.shape[1:]))

    def _input(self, tensor: Tensor, first: int, dtype: torch.dtype | None = None) -> Tensor:
        dims, symbol = range(tensor.dim()), self._numbers.symbol
        sizes = tuple(self._numbers.of(first + d, tensor.shape[d]) for d in dims)
        self.inputs.append((tensor, {d: symbol[first + d] for d in dims if first + d in symbol}))
        return self._recorder.input(tensor, sizes, dtype)

    @property
    def reads_mask(self) -> bool:
        """True if the recording needs more of a mask of padding than its range."""
        return self._mask is not None and self._recorder.is_read(self._mask)

    @property
    def cache(self) -> Any:
        return self._cache.stand_in

    @property
    def numbers(self) -> list[int]:
        """The symbols of the cache's numbers."""
        return self._entries.symbols

    @property
    def buffers(self) -> list[int]:
        """For each buffer a view that shows it up to its end."""
        return self._buffers.views

    def match(self, program: Any, writes: list[list[Write]]) -> Match:
        """Calls like the recorded one, which a program computes, and which write this into their caches."""
        return Match(
            program=program,
            around=self._around,
            padding=None if self._padding is None else self._padding[0] is not None,
            arguments=self._known,
            cache=self._cache.name,
            attributes=self._cache.attributes,
            layers=self._cache.layers,
            entries=self._entries,
            buffers=self._buffers.match(),
            writes=writes,
        )

    def written(self, expression: Callable[[Any], int], first: int) -> tuple[list[list[Write]], list[Tensor]]:
        """Called once the call is recorded.

        Args:
            expression: gives a number of the recording its place among the integers of a call.
            first: the place among the results of a call of those for the cache.

        Returns: for each container what the call writes there; the recorded tensors that are its results.
        """
        tensors: list[Tensor] = []
        every: list[list[Write]] = []
        for before, after in self._cache.changed():
            writes = []
            for name, value in after.items():
                if value is not before[name]:
                    writes.append(self._write(name, value, expression, first + len(tensors)))
                    tensors += parts(value) if isinstance(value, Tensor) else ()
            every.append(writes)
        return every, tensors

    def _write(self, name: Any, value: Any, expression: Callable[[Any], int], first: int) -> Write:
        """The write that puts an entry of a cache back after a call.

        Raises: NotCapturable for a buffer that grows, and for values of other types.
        """
        if isinstance(value, Tensor):
            buffer, result = buffer_of(value), (type(value), first, len(parts(value)))
            if buffer is None:
                return Write(name, TENSOR, result)
            number = self._buffers.number_of(buffer)
            if number is None:
                raise NotCapturable("the cache moves to a larger buffer")
            return Write(name, VIEW, result, number, expression(buffer.end))
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return Write(name, NUMBER, expression(value))
        if isinstance(value, STATIC_TYPES):
            return Write(name, STATIC, value)
        raise NotCapturable(f"the call gives its cache {name}, a {type(value).__name__}")


def _empty_copy(cache: Any) -> Any:
    """A cache with layers like another one's, which share nothing that changes."""
    return copy_of_cache(cache, [*map(_copy, cache.layers)])


def _copy(layer: Any) -> Any:
    return Separate(map(copy_of_layer, layer.layers)) if type(layer) is Separate else copy_of_layer(layer)


def _narrow(memory: Tensor, start: Any, tokens: Any, column: int, width: int) -> Callable[[], Tensor]:
    """Function that returns a view of `tokens` tokens of a buffer, and of some of its columns."""

    def narrowed() -> Tensor:
        some = memory.narrow(-2, start, tokens)
        return some if width == memory.shape[-1] else some.narrow(-1, column, width)

    return narrowed


def _like(states: Tensor, fakes: list[Tensor]) -> Any:
    return fakes[0] if len(fakes) == 1 else QuantizedStates(*fakes)
