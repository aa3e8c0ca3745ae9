"""Takes calls with the same key apart in microseconds, and puts what they have made into their cache."""

from collections.abc import Callable
from itertools import chain, repeat
from operator import is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.causal_mask import CausalMask
from ..basics.key_range import RANGE
from ..basics.wide_logits import are_wide
from ..caches.growing import END, MEMORY
from ..caches.quantized_states import QuantizedStates
from ..caches.state import LayerState, parts
from ..graphs.tracing import NotCapturable, Recorder
from .arguments import MASK, flat
from .caches import (
    all_parts,
    column_of,
    empty_copy,
    is_cache,
    items_of,
    kind_of,
    layers_of,
    places_of,
    start_of,
    static_of,
)
from .fingerprint import default_device
from .reading import ARGUMENTS, HELD, NUMBER, STATIC, STATIC_TYPES, TENSOR, Entry, Reading

SIZE, TOKENS, START = range(4, 7)  # beside NUMBER what a symbol is read from
_NUMBERS = "numbers that were equal in the captured call differ"


class Taken(NamedTuple):
    """A call's tensors and numbers."""

    inputs: list[Tensor]
    views: list[Tensor]
    memories: tuple[Any, ...]
    places: list[Any]
    symbols: list[int]
    cache: Any


class _Places:
    """Entries that the dictionaries of a cache and of masks have in every call, read in one go."""

    def __init__(self, entries: list[list[Entry]], sizes: list[int], symbol: dict[int, int]) -> None:
        self._sizes = sizes
        self._getters = [_getter([entry.name for entry in own]) for own in entries]
        every = [entry for own in entries for entry in own]
        changing = {n: symbol[e.first] for n, e in enumerate(every) if e.kind == NUMBER and e.first in symbol}
        static = [n for n, e in enumerate(every) if e.kind in (STATIC, NUMBER) and n not in changing]
        self._static, self._known = _getter(static), tuple(every[n].value for n in static)
        self.numbers, self.symbols = _getter([*changing]), _getter([*changing.values()])
        self.tensors = _getter([n for n, entry in enumerate(every) if entry.kind == TENSOR])
        self.held = _getter([n for n, entry in enumerate(every) if entry.kind == HELD])

    def read(self, places: list[Any]) -> list[Any] | None:
        """All values; None if those that do not change are others."""
        if list(map(len, places)) != self._sizes:
            return None
        values = [value for get, held in zip(self._getters, places, strict=True) for value in get(held)]
        return values if self._static(values) == self._known else None


class CallPlan:
    """How to take calls apart that are like that of a reading, and to record it.

    Attributes:
        stand_ins: the arguments of the recorded call, as `flat` gives them.
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
        self._symbol, self._symints, self._recorder = symbol, symints, recorder
        self._default_device, self._wide = default_device(), are_wide()
        self._padding = reading.padding
        self._mask: Any = None  # of padding, in the recording
        self._cache: str | None = None
        self._masks: list[tuple[Any, tuple[Any, ...]]] = []
        self._attributes: dict[str, Any] = {}
        self._layers: list[tuple[type, list[str]]] = []
        self._arguments: list[tuple[Any, int, Any]] = []
        self._numbers: list[tuple[Any, int]] = []  # of the arguments
        self._ends: list[tuple[int, ...]] = []  # of each memory: its written end is the sum of these
        self._sources: dict[int, tuple[int, int, Any]] = {}  # of symbols
        self._before: list[dict[Any, Any]] = []  # what the recording's cache holds at its begin
        self._memories: dict[int, tuple[int, Any, int]] = {}  # by id: number, stand-in, its first input
        self._memory_of: list[int] = []  # of each value that shows one
        self._writes: list[list[tuple[Any, int, Any, Any]]] = []
        for entry in reading.entries:
            if entry.place == ARGUMENTS:
                self._add_argument(entry)
        layers: list[Any] = [] if self._cache is None else layers_of(self.stand_in_of_cache)
        self._layers = [(type(layer), LayerState(layer).dictionaries) for layer in layers]
        self._add_places(reading)
        self._readers = [self._sources[number] for number in range(len(symints))]
        self._kinds_of_ends = list(dict.fromkeys(self._ends))
        self._ends_of = _getter([self._kinds_of_ends.index(end) for end in self._ends])
        self._memories_of = _getter(self._memory_of)  # what is held
        self._first_of = _getter([self._memory_of.index(number) for number in range(len(self._ends))])

    def _add_argument(self, entry: Entry) -> None:
        _, name, kind, value, first = entry
        if is_cache(name, value):
            self._cache, self._attributes = name, static_of(value)
            self.stand_ins[name] = empty_copy(value)
            return
        if isinstance(value, CausalMask):
            self._masks.append((name, kind_of(value)))
            self.stand_ins[name] = CausalMask(value.shape, 0, None, value.dtype, value.device)
            return
        self._arguments.append((name, kind, value))
        if kind == NUMBER:
            self.stand_ins[name] = self._number(first, (NUMBER, ARGUMENTS, name), value)
            if first in self._symbol:
                self._numbers.append((name, self._symbol[first]))
                self._arguments[-1] = name, NUMBER, None
            return
        if name != MASK or self._padding is None:
            self.stand_ins[name] = self._input(value, first) if kind == TENSOR else value
            return
        # Whoever asks for bool gets it as it is, with its range.
        self._mask = self.stand_ins[name] = self._input(value, first, torch.bool)
        (keys,) = self._padding
        setattr(self._mask, RANGE, (None if keys is None else self._of_rows(keys, first),))

    def _places_in(self, arguments: dict[Any, Any]) -> list[Any]:
        """The dictionaries and lists of a call's cache, and the dictionaries of its masks."""
        masks = [vars(arguments[name]) for name, _ in self._masks]
        if self._cache is None:
            return masks
        return places_of(arguments[self._cache], self._layers) + masks

    def _add_places(self, reading: Reading) -> None:
        entries: dict[int, list[Entry]] = {}
        for entry in reading.entries:
            entries.setdefault(entry.place, []).append(entry)
        places = self._places_in(self.stand_ins)
        own = [entries.get(place, []) for place in range(len(places))]
        self._places = _Places(own, list(map(len, places)), self._symbol)
        for entry in sorted(chain(*own), key=lambda entry: entry.kind):  # tensors, then views, as `take` does
            places[entry.place][entry.name] = self._stand_in(entry)
        self._before = [dict(items_of(held)) for held in places]

    def _stand_in(self, entry: Entry) -> Any:
        place, name, kind, value, first = entry
        if kind == STATIC:
            return value
        if kind == NUMBER:
            return self._number(first, (NUMBER, place, name), value)
        if kind == TENSOR:
            fakes = []
            for tensor in parts(value):
                fakes.append(self._input(tensor, first))
                first += tensor.dim()
            return _like(value, fakes)
        real = getattr(value, MEMORY)
        if id(real) not in self._memories:
            source, position, fakes = len(self.inputs), first, []
            for tensor in parts(real):
                fakes.append(self._input(tensor, position))
                position += tensor.dim() + 2
            self._memories[id(real)] = len(self._memories), _like(real, fakes), source
        memory, stand_in, source = self._memories[id(real)]
        self._memory_of.append(memory)
        views = []
        for view, tensor, fake in zip(parts(value), parts(real), parts(stand_in), strict=True):
            first += tensor.dim() + 2
            number, begins, column = len(self.views), start_of(view, tensor), column_of(view, tensor)
            tokens = self._number(first - 2, (TOKENS, number, None), view.shape[-2])
            start = self._number(first - 1, (START, number, None), begins)
            symbols = [self._symbol.get(position, -1) for position in (first - 1, first - 2)]
            sum_of = (begins, symbols[0], view.shape[-2], symbols[1])
            self.views.append((source, *sum_of, column, view.shape[-1]))
            views.append(self._recorder.run(_narrow(fake, start, tokens, column, view.shape[-1])))
            source += 1
        if memory == len(self._ends):
            self._ends.append(sum_of)
            setattr(stand_in, END, start + tokens)
        states = _like(value, views)
        setattr(states, MEMORY, stand_in)
        return states

    def fixed_input(self, tensor: Tensor) -> Tensor:
        """The next input, like a tensor whose sizes are those of every call."""
        self.inputs.append((tensor, {}))
        return self._recorder.input(tensor, tensor.shape)

    def _of_rows(self, tensor: Tensor, first: int) -> Tensor:
        """The next input, with as many rows as the one whose numbers begin at `first`."""
        symbol = self._symbol.get(first)
        if symbol is None:
            return self.fixed_input(tensor)
        self.inputs.append((tensor, {0: symbol}))
        return self._recorder.input(tensor, (self._symints[symbol], *tensor.shape[1:]))

    def _input(self, tensor: Tensor, first: int, dtype: torch.dtype | None = None) -> Tensor:
        number, dims = len(self.inputs), range(tensor.dim())
        sizes = tuple(self._number(first + d, (SIZE, number, d), tensor.shape[d]) for d in dims)
        self.inputs.append((tensor, {d: self._symbol[first + d] for d in dims if first + d in self._symbol}))
        return self._recorder.input(tensor, sizes, dtype)

    def _number(self, position: int, source: tuple[int, int, Any], value: int) -> Any:
        symbol = self._symbol.get(position)
        if symbol is None:
            return value
        self._sources.setdefault(symbol, source)
        return self._symints[symbol]

    @property
    def reads_mask(self) -> bool:
        """Whether the recording needs more of a mask of padding than its range."""
        return self._mask is not None and self._recorder.is_read(self._mask)

    @property
    def stand_in_of_cache(self) -> Any:
        return None if self._cache is None else self.stand_ins[self._cache]

    def finish(self, expression: Callable[[Any], int], first: int) -> list[Tensor]:
        """Called once the call is recorded.

        Args:
            expression: gives a number of the recording its place among the integers of a call.
            first: the place among the results of a call of those for the cache.

        Returns: the recording's tensors that become results for the cache.
        """
        tensors: list[Tensor] = []
        if self._cache is None:
            return tensors
        cache = self.stand_in_of_cache
        if static_of(cache) != self._attributes:
            raise NotCapturable("the call changes its cache's attributes")
        for layer, (_, names) in zip(layers_of(cache), self._layers, strict=True):
            if not {*LayerState(layer).dictionaries} >= set(names):
                raise NotCapturable("the call takes attributes from a layer of its cache")
        places = places_of(cache, self._layers)
        for before, held in zip(self._before, map(dict, map(items_of, places)), strict=False):  # not of masks
            writes: list[tuple[Any, int, Any, Any]] = []
            if before.keys() != held.keys():
                raise NotCapturable("the call gives a layer of its cache attributes")
            for name, value in held.items():
                if value is before[name]:
                    continue
                if isinstance(value, Tensor):
                    memory, end = getattr(value, MEMORY, None), None
                    known = self._memories.values()
                    place = next((number for number, item, _ in known if item is memory), None)
                    if place is None and memory is not None:
                        raise NotCapturable("the cache moves to new memory")
                    if memory is not None:
                        end = expression(getattr(memory, END))
                    kept = type(value), first + len(tensors), len(parts(value))
                    writes.append((name, HELD, kept, (place, end)))
                    tensors += parts(value)
                elif isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                    writes.append((name, NUMBER, expression(value), None))
                elif isinstance(value, STATIC_TYPES):
                    writes.append((name, STATIC, value, None))
                else:
                    raise NotCapturable(f"the call gives its cache {name}, a {type(value).__name__}")
            self._writes.append(writes)
        return tensors

    def forget(self) -> None:
        """Drops what only the recording needed."""
        self.stand_ins, self._before, self._memories, self._symints = {}, [], {}, []
        self._mask = None
        del self._recorder

    def take(self, arguments: dict[str, Any], padding: Callable[[], Any]) -> Taken | str:
        """A call like the recorded one, as far as Python can tell; for another one what differs.

        `padding` gives what `padding_of` gives for the call.
        """
        inputs: list[Tensor] = []
        arguments = flat(arguments)
        if len(arguments) != len(self._arguments) + len(self._masks) + (self._cache is not None):
            return "it has other arguments"
        if default_device() != self._default_device:
            return "the default device is another one"
        if are_wide() != self._wide:
            return "its logits have another dtype"
        for name, kind, value in self._arguments:
            passed = arguments.get(name)
            if kind == TENSOR:
                inputs.append(passed)  # type: ignore[arg-type]  # its type is compared below
                if name == MASK and self._padding is not None:
                    result = padding()
                    if result is None or (result[0] is None) != (self._padding[0] is None):
                        return "its padding is of another kind"
                    inputs += [keys for keys in result if keys is not None]
            elif kind == NUMBER and value is None:
                if type(passed) is not int:
                    return f"{name} is of another kind"
            elif passed is not value and (type(passed) is not type(value) or passed != value):
                return f"{name} is another one"
        for name, known in self._masks:
            passed = arguments.get(name)
            if type(passed) is not CausalMask or kind_of(passed) != known:
                return f"{name} is of another kind"
        cache = None if self._cache is None else arguments.get(self._cache)
        if self._cache is not None:
            if not is_cache(self._cache, cache) or static_of(cache) != self._attributes:
                return "the cache is of another kind"
            if list(map(type, layers_of(cache))) != [known for known, _ in self._layers]:
                return "the cache has other layers"
        places = self._places_in(arguments)
        values = self._places.read(places)
        if values is None:
            return "the cache has other attributes"
        held = self._places.held(values)
        of_views = [getattr(view, MEMORY) for view in held]
        memories = self._first_of(of_views)
        if any(map(is_not, of_views, self._memories_of(memories))):
            return "the layers of the cache share other memory"
        inputs += all_parts(self._places.tensors(values) + memories)
        views = all_parts(held)
        if any(map(is_not, map(type, inputs), repeat(Tensor))):
            return "a tensor is of another class"
        symbols = self._read(inputs, views, [*places, arguments])
        if any(arguments[name] != symbols[number] for name, number in self._numbers):
            return _NUMBERS
        if self._places.numbers(values) != self._places.symbols(symbols):
            return _NUMBERS
        ends = [
            (start if first < 0 else symbols[first]) + (tokens if count < 0 else symbols[count])
            for start, first, tokens, count in self._kinds_of_ends
        ]
        if tuple([getattr(memory, END) for memory in memories]) != self._ends_of(ends):
            return "somebody else has written behind the cache's last token"
        return Taken(inputs, views, memories, places, symbols, cache)

    def _read(self, inputs: list[Tensor], views: list[Tensor], places: list[Any]) -> list[int]:
        symbols: list[int] = []
        for kind, number, where in self._readers:
            if kind == SIZE:
                symbols.append(inputs[number].shape[where])
            elif kind == TOKENS:
                symbols.append(views[number].shape[-2])
            elif kind == START:
                symbols.append(start_of(views[number], inputs[self.views[number][0]]))
            else:
                symbols.append(places[number][where])
        return symbols

    def give(self, taken: Taken, results: list[Tensor], integers: list[int]) -> None:
        """Puts what a call has made into its cache."""
        for held, writes in zip(taken.places, self._writes, strict=False):  # nothing into masks
            for name, kind, value, where in writes:
                if kind == NUMBER:
                    held[name] = integers[value]
                elif kind == STATIC:
                    held[name] = value
                else:
                    cls, first, count = value
                    states = results[first] if count == 1 else cls(*results[first : first + count])
                    memory, end = where
                    if memory is not None:
                        setattr(states, MEMORY, taken.memories[memory])
                        setattr(taken.memories[memory], END, integers[end])
                    held[name] = states


def _narrow(memory: Tensor, start: Any, tokens: Any, column: int, width: int) -> Callable[[], Tensor]:
    def narrowed() -> Tensor:
        some = memory.narrow(-2, start, tokens)
        return some if width == memory.shape[-1] else some.narrow(-1, column, width)

    return narrowed


def _like(states: Tensor, fakes: list[Tensor]) -> Any:
    return fakes[0] if len(fakes) == 1 else QuantizedStates(*fakes)


def _getter(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the values of these names."""
    if not names:
        return lambda held: ()
    if len(names) == 1:
        return lambda held: (held[names[0]],)
    return itemgetter(*names)
