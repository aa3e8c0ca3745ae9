"""The cache of a prompt: cut to a prefix, written to a file and read from it.

Keys and values of all tokens can be cut anywhere. Recurrent states, and sliding windows that have moved on,
only fit the prefix that they were computed for: `kept_states` copies them there.
"""

import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache, PreTrainedModel

from ..._faults import synchronize
from ..._text import first_line
from ..basics.interface import experts_on_disk
from ..basics.state import kv_bits_of
from .cache import counts_tokens, keeps_states
from .declared import Trim, declared, is_in_layers
from .layers import FORGETS, growing_class
from .state import LayerState, copy_of_cache, copy_of_layer
from .stored import checksum, reader, stored

_PACKAGE = __package__.partition(".")[0]
_FORM = "torch_moe_mps prompt cache"
_OF_THE_FILE = ("_name_or_path", "transformers_version", "quantization_config", "architectures")
_counted, _numbers = itertools.count(), WeakIdKeyDictionary()  # {tensor of an adapter: its number}
_SAMPLES = 64  # bytes of each tensor that tell models apart
# {position: {index of a layer: its attributes}}: states that only fit a prefix of this length.
States = Mapping[int, dict[int, dict[str, Any]]]


class Unusable(ValueError):
    """A file that is no cache for the model, with the reason."""


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that `generate` would make, with all states in its layers."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def takes_layers(model: PreTrainedModel) -> bool:
    """True if a model takes a cache whose states all lie in its layers."""
    return bool(model._supports_default_dynamic_cache())


def reads_whole(model: PreTrainedModel) -> bool:
    """True if a model must read a prompt in one call: chunks would give it another cache."""
    return keeps_states(model) or any(forgets(model) for forgets in FORGETS)


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
            part = copy_of_layer(layer)
            if layer.is_initialized and layer.keys is not None:
                part.crop(tokens - layer.get_seq_length())
        else:
            part = copy_of_layer(layer, **tree_map(copied, states[tokens][index]))
        layers.append(part)
    return copy_of_cache(cache, layers)


def save_prompt_cache(
    file: str | os.PathLike[str],
    model: PreTrainedModel,
    ids: Tensor,
    cache: DynamicCache,
    states: States = MappingProxyType({}),
) -> None:
    """Write the cache of a prompt, for `load_prompt_cache` of the same model.

    The file is written under another name and renamed: it is whole, or as it was.

    Args:
        file: a safetensors file; one that is not a prompt cache is not replaced.
        model: that computed the cache.
        ids: [1, T] or [T], the tokens of the prompt.
        cache: that the model returned, with T tokens; dense or with kv_bits=8.

    Raises: ValueError for a cache of another length or class, or without keys, for a file that is something
        else, and for a model that reads prompts whole (`reads_whole`); OSError; torch.AcceleratorError as
        `synchronize`.
    """
    if reads_whole(model):
        kind = model.config.get_text_config(decoder=True).model_type
        expected = "one that reads several tokens behind a cache rightly"
        raise ValueError(f"moe_mps::save_prompt_cache: model must be {expected}, got a {kind}")
    ids, path = ids.reshape(-1).cpu(), Path(file)
    if not counts_tokens(cache):
        expected = "keys, by which generate() counts its tokens"
        raise ValueError(
            f"moe_mps::save_prompt_cache: cache must have {expected}, got recurrent states alone"
        )
    if not is_in_layers(cache) or cache.get_seq_length() != len(ids):
        got = f"a {type(cache).__name__} of {cache.get_seq_length()} tokens"
        raise ValueError(f"moe_mps::save_prompt_cache: cache must be a DynamicCache of {len(ids)}, got {got}")
    if path.exists() and not _is_ours(path):
        raise ValueError(f"moe_mps::save_prompt_cache: {path} is not a prompt cache; it was not changed")
    synchronize(model.device)
    tensors: dict[str, Tensor] = {"ids": ids}
    layers = [
        {
            "class": plain_class(layer).__name__,
            "bits": getattr(layer, "bits", None),
            "state": stored(LayerState(layer).stored(), tensors),
        }
        for layer in cache.layers
    ]
    kept = [[position, [[i, stored(s, tensors)] for i, s in of.items()]] for position, of in states.items()]
    about = {
        "form": _FORM,
        "key": json.dumps(key_of(model)),
        "layers": json.dumps(layers),
        "states": json.dumps(kept),
    }
    about["sum"] = str(checksum(about, tensors))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        whole = Path(folder) / path.name
        try:
            save_file(tensors, whole, metadata=about)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        whole.replace(path)


def load_prompt_cache(file: str | os.PathLike[str], model: PreTrainedModel) -> tuple[Tensor, DynamicCache]:
    """Read what `save_prompt_cache` wrote.

    Pass both to `generate`: `model.generate(ids_with_more, cache=cache)`; before transformers 5.24 the cache
    has its older name there. The model computes from them the same bits as from the cache that was saved.

    Returns: the tokens [1, T] and their cache, on the model's device.

    Raises: ValueError for a file that is something else, is damaged, or is of another model, format, kv_bits
        or version; OSError.
    """
    ids, cache, _ = load_with_states(file, model)
    return ids, cache


def load_with_states(
    file: str | os.PathLike[str], model: PreTrainedModel
) -> tuple[Tensor, DynamicCache, dict[int, dict[int, dict[str, Any]]]]:
    """`load_prompt_cache`, with the states of shorter prefixes."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"{file} is no file")
    try:
        with safe_open(file, framework="pt") as held:
            about = held.metadata() or {}
            if about.get("form") != _FORM:
                raise Unusable(f"{file} is not a prompt cache")
            _check_key(file, json.loads(about["key"]), model)
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        if str(checksum(about, tensors)) != about["sum"]:
            raise Unusable(f"{file} is damaged: its checksum is another")
        read = reader(tensors, model.device)
        cache = new_cache(model)
        layers = json.loads(about["layers"])
        while len(cache.layers) < len(layers):
            cache.layers.append(cache.layer_class_to_replicate())
        for layer, result in zip(cache.layers, layers, strict=True):
            if type(layer).__name__ != result["class"]:
                raise Unusable(f"{file} is of a model with other layers")
            if result["bits"] is not None:
                plain: Any = type(layer)
                layer.__class__ = growing_class(plain, result["bits"])
            LayerState(layer).replace(read(result["state"]))
        states = {position: {i: read(s) for i, s in of} for position, of in json.loads(about["states"])}
        return tensors["ids"][None].to(model.device), cache, states
    except (Unusable, OSError):
        raise
    except Exception as error:  # a file may hold anything
        raise Unusable(f"{file} is damaged or not a prompt cache: {first_line(error)}") from None


def fingerprint(model: PreTrainedModel) -> str:
    """Tells models apart by their config, a sample of each tensor, and the adapters that they add."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_THE_FILE}
    result = hashlib.blake2b(json.dumps(config, default=str, sort_keys=True).encode(), digest_size=16)
    samples = []
    on_disk = {name: own.key for name, own in experts_on_disk(model)}
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

    Another adapter of the same name, and one that was trained or loaded anew, is another one.
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


def _check_key(file: object, stored: Mapping[str, Any], model: PreTrainedModel) -> None:
    key = key_of(model)
    for name in key:
        if stored.get(name) == key[name]:
            continue
        if name == "model":
            raise Unusable(f"{file} is for another model, or for other weights of this one")
        raise Unusable(f"{file} must be for {name} {key[name]}, got {stored.get(name)}")


def _is_ours(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as held:
            return (held.metadata() or {}).get("form") == _FORM
    except (SafetensorError, OSError):
        return False


def plain_class(layer: Any) -> type:
    """transformers' class of a layer."""
    return getattr(type(layer), "plain", type(layer))


def copied(value: Any) -> Any:
    """A tensor in memory of its own; any other value itself."""
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
