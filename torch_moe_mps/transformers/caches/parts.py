"""The cache of a prompt in parts: blocks of tokens, each written once, and states that fit one prefix alone.

A part is {index of a layer: its attributes} behind the part's last token. Of a layer that holds all tokens,
the tensors that grow are cut to the tokens of the part (`Grows`); the others are whole in each.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import DynamicCache

from ..._faults import host_copy
from . import growing
from .layers import growing_class
from .prompt_cache import copied, fits_one_prefix, plain_class
from .quantized_states import QuantizedStates
from .state import OWN, LayerState, Name, copy_of_layer
from .stored import Grows, checksum, reader, stored

_FORM = "torch_moe_mps part of a prompt"
Part = Mapping[int, dict[str, Any]]


def block(cache: DynamicCache, start: int, end: int) -> Part:
    """The tokens from `start` to `end`, of the layers that hold all. The tensors are views."""
    part = {}
    for index, layer in enumerate(cache.layers):
        if not fits_one_prefix(layer):
            before, after = (LayerState(_cut(layer, tokens)) for tokens in (start, end))
            held = before.stored()
            part[index] = {
                name: _behind(held.get(name), value, after.axes(Name(OWN, name)).time)
                for name, value in after.stored().items()
            }
    return part


def _cut(layer: Any, tokens: int) -> Any:
    part = copy_of_layer(layer)
    if layer.is_initialized and layer.keys is not None:
        part.crop(tokens - layer.get_seq_length())
    return part


def _behind(before: Any, after: Any, time: int | None) -> Any:
    """The tokens of a tensor beyond its first ones, `before`; any other value itself."""
    if time is None or not isinstance(after, Tensor) or not isinstance(before, Tensor):
        return after
    return Grows(time, after[(slice(None),) * time + (slice(before.shape[time], None),)])


class Joined:
    """A cache that is put together of its parts, in their order.

    Args:
        cache: an empty one of the model.
        tokens: that it will have.

    Attributes:
        tokens: that it has.
    """

    def __init__(self, cache: DynamicCache, tokens: int):
        self.cache, self.tokens, self._most = cache, 0, tokens

    def add(self, part: Part, classes: Mapping[int, tuple[str, int | None]], end: int) -> None:
        """Adds a part, whose tensors are copied: to all layers, or to none if it raises.

        Args:
            classes: {index of a layer: its class in transformers, the bits of its keys and values}
            end: the tokens that the cache then has.

        Raises: ValueError for layers of another cache, and for layers of other lengths.
        """
        layers = [*self.cache.layers]
        while len(layers) <= max(part, default=-1):
            layers.append(self.cache.layer_class_to_replicate())
        for index, values in part.items():
            layers[index] = self._longer_layer(layers[index], values, classes[index], end)
        self.cache.layers[:], self.tokens = layers, end

    def _longer_layer(
        self, layer: Any, values: dict[str, Any], kind: tuple[str, int | None], end: int
    ) -> Any:
        name, bits = kind
        if plain_class(layer).__name__ != name:
            raise ValueError("it is of a model with other layers")
        held = LayerState(layer).values()
        made = copy_of_layer(layer)
        if bits is not None and getattr(layer, "bits", None) is None:
            plain: Any = type(layer)
            made.__class__ = growing_class(plain, bits)
        LayerState(made).replace({key: self._with(held.get(key), new, end) for key, new in values.items()})
        if getattr(made, "keys", None) is not None and made.get_seq_length() != end:
            raise ValueError(f"layers must have {end} tokens, got a {name} of {made.get_seq_length()}")
        return made

    def _with(self, held: Any, new: Any, end: int) -> Any:
        if isinstance(new, dict):
            return {key: copied(value) for key, value in new.items()}
        if not isinstance(new, Grows):
            return copied(new)
        before: Any = held if isinstance(held, Tensor) and self.tokens else None
        if isinstance(new.tensor, QuantizedStates):
            pairs = zip((None,) * 3 if before is None else before.parts(), new.tensor.parts(), strict=True)
            return QuantizedStates(*(self._longer(old, part, new.dim, end) for old, part in pairs))
        return self._longer(before, new.tensor, new.dim, end)

    def _longer(self, held: Tensor | None, new: Tensor, dim: int, end: int) -> Tensor:
        if dim != new.dim() - 2:
            return new.clone() if held is None else torch.cat((held, new), dim)
        left = (self._most - end) * new.shape[dim] // max(1, end - self.tokens)
        (joined,) = growing.extended(
            (new.new_empty(0) if held is None else held,), (new,), left + growing.free_slots_for(self._most)
        )
        return joined


def classes_of(cache: DynamicCache) -> dict[int, tuple[str, int | None]]:
    """{index of a layer: its class in transformers, the bits of its keys and values}"""
    return {
        index: (plain_class(layer).__name__, getattr(layer, "bits", None))
        for index, layer in enumerate(cache.layers)
    }


def octets_of(part: Part, classes: Mapping[int, tuple[str, int | None]], header: str) -> bytes:
    """The file of a part.

    Args:
        header: tells the part from all others; `read_part` must be given the same.

    Raises: ValueError for a value that cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    layers = [[index, *classes[index], stored(values, tensors)] for index, values in part.items()]
    about = {"form": _FORM, "header": header, "layers": json.dumps(layers)}
    about["sum"] = str(checksum(about, tensors))
    return save(tensors, metadata=about)


def read_part(file: Path, header: str) -> tuple[Part, dict[int, tuple[str, int | None]]]:
    """A part and the classes of its layers; its tensors lie in the file, on the CPU.

    Raises: ValueError, OSError, or what safetensors raises, for a file that is damaged, something else, or of
        another header.
    """
    with safe_open(file, framework="pt") as held:
        about = held.metadata() or {}
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    if about.get("form") != _FORM or str(checksum(about, tensors)) != about["sum"]:
        raise ValueError("its checksum is another")
    if about.get("header") != header:
        raise ValueError(f"its header must be {header}, got {about.get('header')}")
    read, part, classes = reader(tensors, torch.device("cpu")), {}, {}
    for index, name, bits, values in json.loads(about["layers"]):
        part[index], classes[index] = read(values), (name, bits)
    return part, classes


def on_device(part: Part, device: torch.device) -> Part:
    """A part whose tensors are on a device."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value.to(device)

    return _mapped(part, moved)


def begun_copy(part: Part) -> Part:
    """A copy of a part on the CPU, complete as `host_copy`."""

    def begun(value: Any) -> Any:
        if isinstance(value, torch.device):
            return value
        return host_copy(value.clone(memory_format=torch.contiguous_format))

    return _mapped(part, begun)


def device_of(part: Part) -> torch.device:
    """The device of a part's tensors; the CPU without any."""
    devices: list[torch.device] = []

    def noted(value: Any) -> Any:
        if isinstance(value, Tensor):
            devices.append(value.device)
        return value

    _mapped(part, noted)
    return devices[0] if devices else torch.device("cpu")


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A part, or a value of one, with its tensors and devices changed."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Grows):
        return Grows(value.dim, _mapped(value.tensor, change))
    if isinstance(value, QuantizedStates):
        return value.map(change)
    return change(value) if isinstance(value, (Tensor, torch.device)) else value
