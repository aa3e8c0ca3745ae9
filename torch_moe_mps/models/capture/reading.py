"""A call of a model, taken apart: its arguments and its cache, as tensors and numbers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase, ProcessorMixin

from ..basics.logits import are_wide
from ..caches.buffer import buffer_of, column_of, start_of
from ..caches.cache import QuantizedCache
from ..caches.declared import declaration_of, is_in_layers
from ..caches.quantized_states import QuantizedStates
from ..caches.state import LayerState, parts
from ..graphs.tracing import LeftAlone, NotCapturable
from ..upstream.models import GROWING
from .match import ARGUMENTS, NUMBER, STATIC, TENSOR, VIEW, Entry, containers_of, layers_of, static_of
from .surroundings import default_device

STATIC_TYPES = (bool, float, str, type(None), torch.dtype, torch.device)
_OF_WINDOWS = ("keys", "values")  # views that stop growing once a window is full
_CACHES = (*GROWING, QuantizedCache)


class Reading:
    """A call, taken apart. Calls with equal keys differ in numbers and tensors alone.

    Attributes:
        key: hashable.
        numbers: sizes of tensors, places in buffers, and numbers of the cache.
        sizes: the positions of numbers that are sizes of tensors.
        rows: the positions of sizes that are the number of rows of the batch, if there are several.
        starts: the positions of numbers that are places in buffers.
        growing: the positions of sizes that grow with a buffer, and of what counts entries for several tokens
            each: it stays for many calls, then changes.
        entries: the values of the call.
        padding: what `padding_of` gives; None without a mask, and where the values of one are read.
        reads_mask: the values of a mask are read, as a recording has shown.
    """

    def __init__(self, arguments: dict[str, Any], padding: tuple[Tensor | None] | None) -> None:
        """Raises: NotCapturable for what cannot be captured."""
        self.numbers: list[int] = []
        self.sizes: set[int] = set()
        self.rows: set[int] = set()
        self.starts: set[int] = set()
        self.growing: set[int] = set()
        self.entries: list[Entry] = []
        self._buffers: dict[int, int] = {}  # by id, in their order
        self._place = 0
        self._rows = _rows_of(arguments)
        self.padding, self.reads_mask = padding, False
        key: list[Any] = [default_device(), are_wide(), None if padding is None else padding[0] is None]
        for name, value in arguments.items():
            if isinstance(value, Cache):
                key += self._cache(name, value)
            elif type(value) is int:
                key += name, STATIC, value
                self.entries.append(Entry(ARGUMENTS, name, STATIC, value, 0))
            else:
                key += self._value(ARGUMENTS, name, value)
        self.key = tuple(key)

    def _cache(self, name: str, cache: Any) -> Iterator[Any]:
        """The key of a cache, in parts: classes of layers and their values. Growing numbers are noted."""
        if any(isinstance(entry.value, Cache) for entry in self.entries):
            raise NotCapturable("it has two caches")
        _require_states(cache)
        self.entries.append(Entry(ARGUMENTS, name, STATIC, cache, 0))
        yield from (name, *static_of(cache).items())
        for layer in layers_of(cache):
            yield type(layer)
        layers = [(type(layer), LayerState(layer).dictionaries) for layer in layers_of(cache)]
        attributes = {*map(id, containers_of(cache, [(kind, []) for kind, _ in layers]))}
        for container in containers_of(cache, layers):
            yield len(container)
            for name, value in container.items():
                if type(value) is int and id(container) not in attributes:
                    self.growing.add(len(self.numbers))
                yield from self._value(self._place, name, value)
            self._place += 1

    def read_mask(self) -> None:
        """From here on a mask of padding is a tensor like any other."""
        self.padding, self.reads_mask = None, True

    def _value(self, place: int, name: Any, value: Any) -> Iterator[Any]:
        """Yields the parts of the key for a value, and adds its numbers and its entry.

        Values have to be read one by one, in the order of the key.
        """
        first, kind = len(self.numbers), STATIC
        yield name
        if type(value) in (Tensor, QuantizedStates):
            kind = TENSOR if buffer_of(value) is None else VIEW
            yield from self._tensors(name, kind, value)
        elif type(value) is int:
            kind = NUMBER
            self.numbers.append(value)
            yield kind
        elif type(value) is tuple and all(type(item) is int for item in value):  # numbers of states
            yield kind, value
        elif isinstance(value, STATIC_TYPES) or (type(value) is list and not value):
            yield from (type(value), value or None)
        elif isinstance(value, (PreTrainedTokenizerBase, ProcessorMixin)):
            yield id(value)  # generate() hands its own on to the model
        elif type(value) is dict and place != ARGUMENTS:  # another place
            return
        else:
            raise NotCapturable(f"{name} is a {type(value).__name__}")
        self.entries.append(Entry(place, name, kind, value, first))

    def _tensors(self, name: Any, kind: int, value: Any) -> Iterator[Any]:
        """Parts of the key for a tensor and for its place in its buffer, if it has one."""
        buffer = buffer_of(value)
        number = self._buffers.setdefault(id(buffer), len(self._buffers))
        yield from (type(value), kind, buffer is not None and number)
        for view, tensor in zip(parts(value), parts(value if buffer is None else buffer.tensor), strict=True):
            yield from (tensor.dtype, tensor.device, tensor.dim())
            yield None if tensor.is_contiguous() else tensor.stride()
            yield self._sizes_of(tensor)
            if buffer is not None:
                yield from (column_of(view), view.shape[-1], _up_to_two(view.shape[-2:-1]))
                self.growing.add(len(self.numbers) - 2)
                if name not in _OF_WINDOWS:
                    self.growing.add(len(self.numbers))
                self.sizes.add(len(self.numbers))
                self.starts.add(len(self.numbers) + 1)
                self.numbers += view.shape[-2], start_of(view)

    def _sizes_of(self, tensor: Tensor) -> tuple[int, ...]:
        self.sizes.update(range(len(self.numbers), len(self.numbers) + tensor.dim()))
        if tensor.dim() > 1 and len(tensor) == self._rows > 1:
            self.rows.add(len(self.numbers))
        self.numbers += tensor.shape
        return _up_to_two(tensor.shape)


def _require_states(cache: Any) -> None:
    """Raises: NotCapturable for a cache of unknown states, or of none."""
    offloads = getattr(cache, "offloading", False)
    if not _is_known(cache) or offloads:
        raise NotCapturable(f"the cache is {'an offloaded' if offloads else 'a'} {type(cache).__name__}")
    if not any(LayerState(layer).tensors() for layer in layers_of(cache)):
        raise LeftAlone("it fills an empty cache")


def _is_known(cache: Any) -> bool:
    """True if a cache, and all of its layers, are of classes whose states are known."""
    if not all(declaration_of(type(layer)) is not None for layer in layers_of(cache)):
        return False
    return type(cache) in _CACHES or is_in_layers(cache)


def _rows_of(arguments: dict[str, Any]) -> int:
    """Number of rows in the batch of a model's call."""
    ids = arguments.get("input_ids")
    return len(arguments["inputs_embeds"] if ids is None else ids)


def _up_to_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes with all equal but 0 and 1, for which torch has rules of their own."""
    return tuple(min(size, 2) for size in sizes)
