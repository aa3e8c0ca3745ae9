"""The cache of a prompt: cut to a prefix, and the key of the model that it is for.

Keys and values of all tokens can be cut anywhere. Recurrent states, and sliding windows that have moved on,
only fit the prefix that they were computed for: `kept_states` copies them there.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache, PreTrainedModel

from ..basics.interface import experts_on_disk
from ..basics.state import kv_bits_of
from .declared import Trim, declared
from .in_layers import cache_class
from .layers import LayerBase
from .state import LayerState, copy_of_cache, copy_of_layer

_PACKAGE = __package__.partition(".")[0]
_OF_THE_FILE = ("_name_or_path", "transformers_version", "quantization_config", "architectures")
_counted, _numbers = itertools.count(), WeakIdKeyDictionary()  # {tensor of an adapter: its number}
_SAMPLES = 64  # bytes of each tensor that tell models apart
# {position: {index of a layer: its attributes}}: states that only fit a prefix of this length.
States = Mapping[int, dict[int, dict[str, Any]]]


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that `generate` would make, with all states in its layers."""
    cache: DynamicCache = cache_class(model)(config=model.config.get_text_config(decoder=True))
    return cache


def takes_layers(model: PreTrainedModel) -> bool:
    """True if a model takes a cache whose states all lie in its layers."""
    return bool(model._supports_default_dynamic_cache()) or cache_class(model) is not DynamicCache


def can_be_cut(layer: Any) -> bool:
    """True if a layer of a cache still has what any prefix of its tokens needs."""
    trim = declared(layer).trim
    return trim is Trim.TOKENS or (
        trim is Trim.WINDOW and bool(layer.cumulative_length < layer.sliding_window)
    )


def gives_back(layer: Any) -> bool:
    """True if tokens can be taken back from a layer: not from states, nor from keys of several tokens."""
    return declared(layer).trim is not Trim.COPY


def fits_one_prefix(layer: Any) -> bool:
    """True if the state of a layer may fit no other number of tokens: a recurrent one, a window."""
    return declared(layer).trim is not Trim.TOKENS


def kept_states(cache: DynamicCache) -> dict[int, dict[str, Any]]:
    """Copies of the layers that cannot be cut back to the tokens that the cache has now."""
    return {
        index: tree_map(copied, LayerState(layer).values())
        for index, layer in enumerate(cache.layers)
        if fits_one_prefix(layer)
    }


def prefix(cache: DynamicCache, tokens: int, states: States) -> DynamicCache:
    """A cache with the first tokens of another, which is unchanged.

    Keys and values are views: a cache that grows in place copies them before it writes.

    Args:
        states: of the prefixes that layers which cannot be cut are kept for; `tokens` is among them if there
            are such layers.
    """
    layers = []
    for index, layer in enumerate(cache.layers):
        if can_be_cut(layer):
            part = cut(layer, tokens)
        else:
            part = copy_of_layer(layer, **tree_map(copied, states[tokens][index]))
        layers.append(part)
    return copy_of_cache(cache, layers)


def cut(layer: Any, tokens: int) -> Any:
    """A copy of a layer with its first tokens, for one that can be cut; it shares memory where it can."""
    part = copy_of_layer(layer)
    if layer.is_initialized and layer.keys is not None:
        if isinstance(layer, LayerBase):
            part.cut(tokens)
        else:
            part.crop(tokens - layer.get_seq_length())
    return part


def fingerprint(model: PreTrainedModel) -> str:
    """Digest of a model's config, of a sample of each tensor, and of the adapters that it adds."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_THE_FILE}
    result = hashlib.blake2b(json.dumps(config, default=str, sort_keys=True).encode(), digest_size=16)
    samples = []
    on_disk = {name: weights.key for name, weights in experts_on_disk(model)}
    result.update("".join(on_disk.values()).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.rpartition(".")[0] in on_disk:
            continue
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        samples.append(flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].clone().view(torch.uint8))
    result.update(torch.cat(samples).cpu().numpy().tobytes())
    added = tuple((name, adapter, module.scaling[adapter]) for name, adapter, module in _added_by(model))
    if added:
        result.update(repr(added).encode())
    return result.hexdigest()


def _added_by(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(name of a layer, adapter, layer) where PEFT's layers add to a model now."""
    if "peft" not in sys.modules:  # each prompt asks
        return
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict) and not module.disable_adapters:
            for adapter in dict.fromkeys((*module.merged_adapters, *module.active_adapters)):
                if adapter in module.scaling:
                    yield name, adapter, module


def adapters_of(model: nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Scales and weights that PEFT's layers add to a model now, as this process tells them apart.

    An adapter of the same name that was trained or loaded anew counts as another one.
    """
    return tuple(
        (name, adapter, module.scaling[adapter], *map(_state, _weights(module, adapter)))
        for name, adapter, module in _added_by(model)
    )


def _weights(module: nn.Module, adapter: str) -> list[Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [tensor for name, tensor in named if adapter in name.split(".")]


def _state(tensor: Tensor) -> tuple[int, int]:
    """Number of a tensor, and of the change that it has seen last."""
    if tensor not in _numbers:
        _numbers[tensor] = next(_counted)
    return _numbers[tensor], 0 if tensor.is_inference() else tensor._version


def key_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that decides the values of a cache: weights, dtype, device, versions."""
    return {
        "model": fingerprint(model),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": model.config._attn_implementation,
        "kv_bits": kv_bits_of(model),
        _PACKAGE: sys.modules[_PACKAGE].__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def plain_class(layer: Any) -> type:
    """transformers' class of a layer."""
    return getattr(type(layer), "plain", type(layer))


def copied(value: Any) -> Any:
    """A tensor in memory of its own; any other value itself."""
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
