"""The cache of a prompt in parts: blocks of tokens, each written once, and states that fit one prefix alone.

A part is {index of a layer: its attributes} behind the part's last token. Of a layer that holds all tokens,
the tensors that grow are cut to the tokens of the part (`Grows`); the others are whole in each.
"""

import json
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache

from ..._faults import host_copy
from ..basics.state import KVBits
from . import growing
from .buffer import changed
from .classes import growing_class
from .prompt_cache import copied, cut, fits_one_prefix, plain_class
from .quantized_states import QuantizedStates
from .state import OWN, LayerState, Name, copy_of_layer

Values = Mapping[int, dict[str, Any]]  # {index of a layer: its attributes}
Classes = Mapping[int, tuple[str, KVBits | None]]  # name in transformers, bits of keys and values


class Grows(NamedTuple):
    """A part of a tensor that grows with the tokens along a dimension."""

    dim: int
    tensor: Tensor


class CachePart(NamedTuple):
    """A part of a cache, and the classes of its layers."""

    values: Values
    classes: Classes

    @property
    def device(self) -> torch.device:
        """The device of the tensors; the CPU without any."""
        tensors = (leaf for leaf in tree_leaves(self.values) if isinstance(leaf, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def on_device(self, device: torch.device) -> "CachePart":
        """A part whose tensors are on a device."""
        return self._replace(
            values=tree_map_only((Tensor, torch.device), partial(_moved, device), self.values)
        )

    def begun_copy(self) -> "CachePart":
        """A copy on the CPU, complete as `host_copy`."""
        copies = tree_map_only(Tensor, lambda value: changed(copied(value), host_copy), self.values)
        return self._replace(values=copies)

    def to_bytes(self, header: str) -> bytes:
        """The file of a part: safetensors, whose metadata has all but the tensors in JSON, and a checksum.

        The part is on the CPU, without views.

        Args:
            header: tells the part from all others; `read` must be given the same.

        Raises: ValueError for a value that cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        layers = [
            [index, *self.classes[index], _stored(values, tensors)] for index, values in self.values.items()
        ]
        about = {"header": header, "layers": json.dumps(layers)}
        return save(tensors, metadata={**about, "sum": _checksum(about, tensors)})

    @classmethod
    def read(cls, file: Path, header: str) -> "CachePart":
        """The part that a file has; its tensors lie in the file, on the CPU.

        Raises: ValueError, OSError, or what safetensors raises, for a file that is damaged, of something
            else, or of another header.
        """
        with safe_open(file, framework="pt") as reader:
            about = reader.metadata() or {}
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        if about.pop("sum", None) != _checksum(about, tensors):
            raise ValueError("its checksum is another")
        if about["header"] != header:
            raise ValueError(f"its header must be {header}, got {about['header']}")
        part, classes = {}, {}
        for index, name, bits, values in json.loads(about["layers"]):
            part[index], classes[index] = _read(values, tensors), (name, bits)
        return cls(part, classes)


def block(cache: DynamicCache, start: int, end: int) -> Values:
    """The tokens from `start` to `end`, of the layers that hold all. The tensors are views."""
    part = {}
    for index, layer in enumerate(cache.layers):
        if not fits_one_prefix(layer):
            before, after = (LayerState(cut(layer, tokens)) for tokens in (start, end))
            stored = before.stored()
            part[index] = {
                name: _behind(stored.get(name), value, after.axes(Name(OWN, name)).time)
                for name, value in after.stored().items()
            }
    return part


def _behind(before: Any, after: Any, time: int | None) -> Any:
    """The tokens of a tensor beyond its first ones, `before`; any other value itself."""
    if time is None or not isinstance(after, Tensor) or not isinstance(before, Tensor):
        return after
    return Grows(time, after[(slice(None),) * time + (slice(before.shape[time], None),)])


class JoinedCache:
    """A cache that is put together of its parts, in their order.

    Args:
        cache: an empty one of the model.
        tokens: that it will have.

    Attributes:
        tokens: that it has.
    """

    def __init__(self, cache: DynamicCache, tokens: int):
        self.cache, self.tokens, self._most = cache, 0, tokens

    def add(self, part: CachePart, end: int) -> None:
        """Adds a part, whose tensors are copied: to all layers, or to none if it raises.

        Args:
            end: the tokens that the cache then has.

        Raises: ValueError for layers of another cache, and for layers of other lengths.
        """
        layers = [*self.cache.layers]
        while len(layers) <= max(part.values, default=-1):
            layers.append(self.cache.layer_class_to_replicate())
        for index, values in part.values.items():
            layers[index] = self._longer_layer(layers[index], values, part.classes[index], end)
        self.cache.layers[:], self.tokens = layers, end

    def _longer_layer(
        self, layer: Any, values: dict[str, Any], kind: tuple[str, KVBits | None], end: int
    ) -> Any:
        """Copy of a layer with the tokens of a part behind its own, up to `end`."""
        name, bits = kind
        if plain_class(layer).__name__ != name:
            raise ValueError("it is of a model with other layers")
        cached = LayerState(layer).values()
        longer = copy_of_layer(layer)
        if bits is not None and getattr(layer, "bits", None) is None:
            plain: Any = type(layer)
            longer.__class__ = growing_class(plain, bits)
        state = LayerState(longer)
        state.replace(
            {
                key: self._with(cached.get(key), new, end, state.axes(Name(OWN, key)).tokens)
                for key, new in values.items()
            }
        )
        if getattr(longer, "keys", None) is not None and longer.get_seq_length() != end:
            raise ValueError(f"layers must have {end} tokens, got a {name} of {longer.get_seq_length()}")
        return longer

    def _with(self, cached: Any, new: Any, end: int, tokens: int) -> Any:
        """A value of a part behind the held one; `tokens` of an entry, as `Axes` has them."""
        if isinstance(new, dict):
            return {key: copied(value) for key, value in new.items()}
        if not isinstance(new, Grows):
            return copied(new)
        before: Any = cached if isinstance(cached, Tensor) and self.tokens else None
        if isinstance(new.tensor, QuantizedStates):
            pairs = zip((None,) * 3 if before is None else before.parts(), new.tensor.parts(), strict=True)
            return QuantizedStates(*(self._longer(old, part, new.dim, end, 1) for old, part in pairs))
        return self._longer(before, new.tensor, new.dim, end, tokens)

    def _longer(self, cached: Tensor | None, new: Tensor, dim: int, end: int, tokens: int) -> Tensor:
        if dim != new.dim() - 2 or tokens == 0:
            return new.clone() if cached is None else torch.cat((cached, new), dim)
        left = (self._most - end) * new.shape[dim] // max(1, end - self.tokens)
        (joined,) = growing.extended(
            (new.new_empty(0) if cached is None else cached,),
            (new,),
            left + growing.spare_for(self._most) // tokens,
        )
        return joined


def classes_of(cache: DynamicCache) -> Classes:
    """{index of a layer: its class in transformers, the bits of its keys and values}"""
    return {
        index: (plain_class(layer).__name__, getattr(layer, "bits", None))
        for index, layer in enumerate(cache.layers)
    }


def _checksum(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a file's metadata, and of its tensors in the order of names."""
    kinds = [[name, str(tensor.dtype), [*tensor.shape]] for name, tensor in sorted(tensors.items())]
    total = zlib.crc32(json.dumps([about, kinds], sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return str(total)


def _stored(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value in JSON, with its tensors aside. Raises: ValueError for any other type."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {"dict": [[key, _stored(item, tensors)] for key, item in value.items()]}
        case Grows():
            return {"grows": [value.dim, _stored(value.tensor, tensors)]}
        case QuantizedStates():
            return {"quantized": [_stored(part, tensors) for part in value.parts()]}
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach()
            return {"tensor": name}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
    raise ValueError(f"a cache with a {type(value).__name__} cannot be written")


def _read(stored: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value from which `_stored` made this JSON."""
    if not isinstance(stored, dict):
        return stored
    ((kind, value),) = stored.items()
    match kind:
        case "dict":
            return {key: _read(item, tensors) for key, item in value}
        case "grows":
            return Grows(value[0], _read(value[1], tensors))
        case "quantized":
            return QuantizedStates(*(_read(part, tensors) for part in value))
        case "tensor":
            return tensors[value]
        case "dtype":
            return getattr(torch, value)
    return torch.device(value)


def _moved(device: torch.device, value: Tensor | torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else device
