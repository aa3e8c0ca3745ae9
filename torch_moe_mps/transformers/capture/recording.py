"""The arguments that a call is recorded with, and where calls like it have them."""

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
from ..caches.state import LayerState, parts
from ..graphs.tracing import NotCapturable, Recorder
from .arguments import MASK
from .caches import (
    empty_copy,
    layers_of,
    slots_of,
    static_of,
)
from .match import SIZE, START, TOKENS, Buffers, Match, Slots, Write, getter
from .reading import ARGUMENTS, HELD, NUMBER, STATIC, STATIC_TYPES, TENSOR, Entry, Reading
from .surroundings import default_device


class _Numbers:
    """Numbers of a call: symbols of the recording, and constants.

    Args:
        symbol: {position of a number: its symbol}.
        symints: stand for symbols in the recording.
    """

    def __init__(self, symbol: dict[int, int], symints: list[Any]):
        self.symbol, self._symints = symbol, symints
        self._sources: dict[int, tuple[int, int, Any]] = {}  # {symbol: source}

    def of(self, position: int, source: tuple[int, int, Any], value: int) -> Any:
        """The number at a position, in the recording."""
        symbol = self.symbol.get(position)
        if symbol is None:
            return value
        self._sources.setdefault(symbol, source)
        return self._symints[symbol]

    def rows(self, symbol: int) -> Any:
        return self._symints[symbol]

    @property
    def readers(self) -> list[tuple[int, int, Any]]:
        """The source of each symbol."""
        return [self._sources[number] for number in range(len(self._symints))]


class _Buffers:
    """The buffers that values of the recorded call show, in their order."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any, int]] = {}  # by id: number, stand-in, its first input
        self._of_values: list[int] = []
        self._ends: list[tuple[int, ...]] = []

    def of(self, real: Any, add: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        """(stand-in of a buffer, its first input); `add` makes them for a new buffer."""
        if id(real) not in self._known:
            self._known[id(real)] = len(self._known), *add()
        number, stand_in, source = self._known[id(real)]
        self._of_values.append(number)
        return stand_in, source

    def ends(self, end: tuple[int, ...]) -> bool:
        """Notes where the buffer of the last value ends, as `Buffers` has it. Returns: whether it is new."""
        is_new = self._of_values[-1] == len(self._ends)
        if is_new:
            self._ends.append(end)
        return is_new

    def number_of(self, stand_in: Any) -> int | None:
        return next((number for number, item, _ in self._known.values() if item is stand_in), None)

    def match(self) -> Buffers:
        ends = list(dict.fromkeys(self._ends))
        return Buffers(
            ends=ends,
            ends_of=getter([ends.index(end) for end in self._ends]),
            of_values=getter(self._of_values),
            first_of=getter([self._of_values.index(number) for number in range(len(self._ends))]),
        )


class _Cache:
    """The cache of the recorded call, and its stand-in.

    Attributes:
        name: of the argument; None for a call without one.
        attributes, layers: as `Match` has them.
        before: contents of the stand-in's slots at the begin of the recording.
    """

    def __init__(self, name: str | None = None, value: Any = None):
        self.name, self.stand_in = name, None if name is None else empty_copy(value)
        self.attributes: dict[str, Any] = {} if name is None else static_of(value)
        layers = layers_of(self.stand_in)
        self.layers = [(type(layer), LayerState(layer).dictionaries) for layer in layers]
        self.before: list[dict[Any, Any]] = []

    def slots(self) -> list[Any]:
        return slots_of(self.stand_in, self.layers)

    def changed(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """The contents of each slot before the call, and behind it.

        Raises: NotCapturable where there are other ones, or attributes.
        """
        if self.name is None:
            return []
        if static_of(self.stand_in) != self.attributes:
            raise NotCapturable("the call changes its cache's attributes")
        for layer, (_, names) in zip(layers_of(self.stand_in), self.layers, strict=True):
            if not {*LayerState(layer).dictionaries} >= set(names):
                raise NotCapturable("the call takes attributes from a layer of its cache")
        pairs = [*zip(self.before, map(dict, self.slots()), strict=True)]
        if any(before.keys() != held.keys() for before, held in pairs):
            raise NotCapturable("the call gives a layer of its cache attributes")
        return pairs


class Recording:
    """Stand-ins for what a call has, and what was read of it. It is dropped once the program is made.

    Attributes:
        stand_ins: the arguments of the recorded call, by name.
        inputs: for each input a tensor like it, and {dimension: symbol} where its size is one.
        views: for each view what `add_view` of a program takes.
    """

    def __init__(
        self, reading: Reading, symbol: dict[int, int], symints: list[Any], recorder: Recorder
    ) -> None:
        """`symbol`: {position of a number: its symbol}; `symints` stand for symbols in the recording."""
        self.stand_ins: dict[Any, Any] = {}
        self.inputs: list[tuple[Tensor, dict[int, int]]] = []
        self.views: list[tuple[int, ...]] = []
        self._numbers, self._recorder = _Numbers(symbol, symints), recorder
        self._around = default_device(), are_wide()
        self._padding = reading.padding
        self._mask: Any = None  # stands for the mask of padding
        self._cache, self._buffers = _Cache(), _Buffers()
        self._arguments: list[tuple[Any, int, Any]] = []
        for entry in reading.entries:
            if entry.place == ARGUMENTS:
                self._add_argument(entry)
        self._add_slots(reading)

    def _add_argument(self, entry: Entry) -> None:
        _, name, kind, value, first = entry
        if isinstance(value, Cache):
            self._cache = _Cache(name, value)
            self.stand_ins[name] = self._cache.stand_in
            return
        self._arguments.append((name, kind, value))
        if name != MASK or self._padding is None:
            self.stand_ins[name] = self._input(value, first) if kind == TENSOR else value
            return
        # Whoever asks for bool gets it as it is, with its range.
        self._mask = self.stand_ins[name] = self._input(value, first, torch.bool)
        (keys,) = self._padding
        notes_on(self._mask).key_range = (None if keys is None else self._of_rows(keys, first),)

    def _add_slots(self, reading: Reading) -> None:
        entries: dict[int, list[Entry]] = {}
        for entry in reading.entries:
            entries.setdefault(entry.place, []).append(entry)
        slots = self._cache.slots()
        own = [entries.get(place, []) for place in range(len(slots))]
        self._slots = Slots(own, list(map(len, slots)), self._numbers.symbol)
        for entry in sorted(chain(*own), key=lambda entry: entry.kind):  # tensors, then views, as `take` does
            slots[entry.place][entry.name] = self._stand_in(entry)
        self._cache.before = [dict(held) for held in slots]

    def _stand_in(self, entry: Entry) -> Any:
        place, name, kind, value, first = entry
        if kind == STATIC:
            return value
        if kind == NUMBER:
            return self._numbers.of(first, (NUMBER, place, name), value)
        if kind == TENSOR:
            return self._inputs(value, first)
        real, number_of = buffer_of(value), self._numbers
        assert real is not None
        stand_in, source = self._buffers.of(real, lambda: self._buffer(real, first))
        views = []
        for view, tensor, fake in zip(parts(value), parts(real.tensor), parts(stand_in.tensor), strict=True):
            first += tensor.dim() + 2
            number, begins, column = len(self.views), start_of(view), column_of(view)
            tokens = number_of.of(first - 2, (TOKENS, number, None), view.shape[-2])
            start = number_of.of(first - 1, (START, number, None), begins)
            symbols = [number_of.symbol.get(position, -1) for position in (first - 1, first - 2)]
            sum_of = (begins, symbols[0], view.shape[-2], symbols[1])
            self.views.append((source, *sum_of, column, view.shape[-1]))
            views.append(self._recorder.run(_narrow(fake, start, tokens, column, view.shape[-1])))
            source += 1
        if self._buffers.ends(sum_of):
            stand_in.end = start + tokens
        return stand_in.attach(_like(value, views))

    def _buffer(self, real: Buffer, first: int) -> tuple[Buffer, int]:
        """The stand-in of a buffer, and the number of its first input."""
        source = len(self.inputs)
        return Buffer(self._inputs(real.tensor, first, beside=2)), source  # a view has two numbers more

    def _inputs(self, value: Any, first: int, beside: int = 0) -> Any:
        """The next inputs, for the parts of a value, whose numbers begin at `first`."""
        fakes = []
        for tensor in parts(value):
            fakes.append(self._input(tensor, first))
            first += tensor.dim() + beside
        return _like(value, fakes)

    def fixed_input(self, tensor: Tensor) -> Tensor:
        """The next input, like a tensor with the sizes of every call."""
        self.inputs.append((tensor, {}))
        return self._recorder.input(tensor, tensor.shape)

    def _of_rows(self, tensor: Tensor, first: int) -> Tensor:
        """The next input, with as many rows as the one whose numbers begin at `first`."""
        symbol = self._numbers.symbol.get(first)
        if symbol is None:
            return self.fixed_input(tensor)
        self.inputs.append((tensor, {0: symbol}))
        return self._recorder.input(tensor, (self._numbers.rows(symbol), *tensor.shape[1:]))

    def _input(self, tensor: Tensor, first: int, dtype: torch.dtype | None = None) -> Tensor:
        number, dims, symbol = len(self.inputs), range(tensor.dim()), self._numbers.symbol
        sizes = tuple(self._numbers.of(first + d, (SIZE, number, d), tensor.shape[d]) for d in dims)
        self.inputs.append((tensor, {d: symbol[first + d] for d in dims if first + d in symbol}))
        return self._recorder.input(tensor, sizes, dtype)

    @property
    def reads_mask(self) -> bool:
        """True if the recording needs more of a mask of padding than its range."""
        return self._mask is not None and self._recorder.is_read(self._mask)

    @property
    def stand_in_of_cache(self) -> Any:
        return self._cache.stand_in

    def match(self, writes: list[list[Write]]) -> Match:
        """Calls like the recorded one, which write this into their caches."""
        return Match(
            around=self._around,
            padding=None if self._padding is None else self._padding[0] is not None,
            arguments=self._arguments,
            cache=self._cache.name,
            attributes=self._cache.attributes,
            layers=self._cache.layers,
            slots=self._slots,
            readers=self._numbers.readers,
            buffers=self._buffers.match(),
            writes=writes,
        )

    def written(self, expression: Callable[[Any], int], first: int) -> tuple[list[list[Write]], list[Tensor]]:
        """Called once the call is recorded.

        Args:
            expression: gives a number of the recording its place among the integers of a call.
            first: the place among the results of a call of those for the cache.

        Returns: for each slot what the call writes there; the recording's tensors that become results for it.
        """
        tensors: list[Tensor] = []
        every: list[list[Write]] = []
        for before, held in self._cache.changed():
            writes = []
            for name, value in held.items():
                if value is not before[name]:
                    writes.append(self._write(name, value, expression, first + len(tensors)))
                    tensors += parts(value) if isinstance(value, Tensor) else ()
            every.append(writes)
        return every, tensors

    def _write(self, name: Any, value: Any, expression: Callable[[Any], int], first: int) -> Write:
        if isinstance(value, Tensor):
            buffer, result = buffer_of(value), (type(value), first, len(parts(value)))
            if buffer is None:
                return Write(name, HELD, result)
            number = self._buffers.number_of(buffer)
            if number is None:
                raise NotCapturable("the cache moves to a larger buffer")
            return Write(name, HELD, result, number, expression(buffer.end))
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return Write(name, NUMBER, expression(value))
        if isinstance(value, STATIC_TYPES):
            return Write(name, STATIC, value)
        raise NotCapturable(f"the call gives its cache {name}, a {type(value).__name__}")


def _narrow(memory: Tensor, start: Any, tokens: Any, column: int, width: int) -> Callable[[], Tensor]:
    def narrowed() -> Tensor:
        some = memory.narrow(-2, start, tokens)
        return some if width == memory.shape[-1] else some.narrow(-1, column, width)

    return narrowed


def _like(states: Tensor, fakes: list[Tensor]) -> Any:
    return fakes[0] if len(fakes) == 1 else QuantizedStates(*fakes)
