"""Values of a cache in a safetensors file: tensors by name, all else in JSON beside them, and a checksum."""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantized_states import QuantizedStates


class Grows(NamedTuple):
    """A part of a tensor that grows with the tokens along a dimension."""

    dim: int
    tensor: Tensor


def stored(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value in JSON, with its tensors aside. Raises: ValueError for any other type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[key, stored(item, tensors)] for key, item in value.items()]}
    if isinstance(value, Grows):
        return {"grows": [value.dim, stored(value.tensor, tensors)]}
    if isinstance(value, QuantizedStates):
        return {"quantized": [stored(part, tensors)["tensor"] for part in value.parts()]}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    raise ValueError(f"moe_mps::save_prompt_cache: a cache with a {type(value).__name__} cannot be written")


def reader(tensors: Mapping[str, Tensor], device: torch.device) -> Callable[[Any], Any]:
    """Function that turns JSON of `stored` into the value."""

    def read(held: Any) -> Any:
        if not isinstance(held, dict):
            return held
        ((kind, value),) = held.items()
        match kind:
            case "dict":
                return {key: read(item) for key, item in value}
            case "grows":
                return Grows(value[0], read(value[1]))
            case "quantized":
                return QuantizedStates(*(tensors[name].to(device) for name in value))
            case "tensor":
                return tensors[value].to(device)
            case "dtype":
                return getattr(torch, value)
            case _:
                return device

    return read


def checksum(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    """A checksum of all that a file says: its metadata but the sum, and the tensors in the order of names."""
    header = [
        {name: text for name, text in about.items() if name != "sum"},
        [[name, str(tensor.dtype), [*tensor.shape]] for name, tensor in sorted(tensors.items())],
    ]
    total = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return total
