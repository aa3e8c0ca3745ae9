"""Models whose experts stay on the disk: the file of their experts, and loading beside it."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._progress import with_progress
from ..._text import bytes_in
from ...disk.file import ExpertsFile, Layer, size_of_file, written
from ...disk.pool import Pools, least_memory, most_experts, slots_in
from ...disk.stored import StoredExperts
from ...macs import memory_for_models
from ...quantization import TENSORS, Format
from ..basics.interface import Experts, experts_of, is_quantized, projections
from ..modules.experts import pinned_config
from ..modules.experts_on_disk import give_weights, keep_whole, put_on_disk
from .cutting import cutting
from .layouts.files import checkpoint_files, sample_of
from .quantize.sizes import room_for_experts, top_k, total_bytes
from .quantizer import quantizer_for
from .rows import rows_of
from .source import Source
from .write.parts import Parts

AUTO = "auto"
NAME = "experts.moe_mps"  # the file beside a checkpoint's
_FORMATS = ("quantization", "down_quantization", "up_quantization")


def path_of(source: Source) -> Path:
    """The file of the experts of a checkpoint, beside its files."""
    if source.gguf is not None:
        return Path(source.path) / f"{source.gguf}.{NAME}"
    return Path(source.folder) / (source.others.get("subfolder") or "") / NAME


def experts_file(
    source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer]
) -> ExpertsFile | StoredExperts:
    """Experts as `from_pretrained` would load them: in the checkpoint's own files, or in a file of them.

    That is written first unless it is there; one layer at a time is in memory.

    Args:
        recipe: arguments of `accelerate`, by which weights are quantised.
        layers: by `layers_of`.

    Raises: ValueError for a file of another checkpoint or recipe, or without space on the disk; OSError.
    """
    path, files = path_of(source), _files(source)
    key = _key(source, files, recipe)
    if (found := _found(source, recipe, layers)) is not None:
        return found
    print(f"torch_moe_mps: writing {path}, {size_of_file(layers) / 1e9:.2f} GB, once", file=sys.stderr)
    how: dict[str, Any] = {name: source.others.get(name) or usual for name, usual in _OPTIONS.items()}
    model_class = source.cls if isinstance(source.cls, type) else None
    checkpoint = files[0] if source.gguf is not None else source.folder
    with (
        written(path, key, layers) as new,
        Parts(checkpoint, model_class=model_class, recipe=recipe, packs=True, **how) as parts,
    ):
        for number in with_progress(new.left.copy(), "Writing experts", "layer", len(layers) - len(new.left)):
            name = layers[number].name
            with parts.loaded(name):
                new.add(number, tensors_of(parts.model.get_submodule(name)))
    return ExpertsFile(path, key)


_OPTIONS = {"dtype": "auto", "trust_remote_code": False}


def _found(
    source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer]
) -> ExpertsFile | StoredExperts | None:
    """The experts, if they can be read without writing anything. Raises: ValueError for another's file."""
    path, files = path_of(source), _files(source)
    key = _key(source, files, recipe)
    if path.exists():
        return ExpertsFile(path, key)
    if source.gguf is not None:
        return None
    model, quantizer = _dense(source, recipe)
    rows = None if quantizer is None and source.stored else rows_of(model, quantizer, files, layers)
    return None if rows is None else StoredExperts(path.parent, key, layers, rows)


def placed(source: Source, recipe: Mapping[str, Any] | None) -> Any:
    """A checkpoint's model on the meta device, with the weights that it will have."""
    model, quantizer = _dense(source, recipe)
    if quantizer is not None:
        quantizer.place_empty(model, lambda name: True)
    return model


def _dense(source: Source, recipe: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A checkpoint's dense model on the meta device, and its quantizer, which has placed nothing yet."""
    model = source.skeleton()
    return model, quantizer_for(source, model, _files(source), recipe, True, packs=True)


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of the experts of a model, by `placed`. Raises: ValueError if there are none."""
    result = [_layer(name, module) for name, module in experts_of(model).items()]
    if not result:
        expected = "for a model whose experts have transformers' interface"
        got = type(model).__name__
        raise ValueError(f"moe_mps::from_pretrained: experts_memory is {expected}, got {got}")
    return result


class Plan(NamedTuple):
    """Experts of a model that do not all fit into some memory.

    Attributes:
        memory: bytes of the experts in memory.
        slots: of each layer, in that memory.
        layers: the model's.
    """

    memory: int
    slots: int
    layers: list[Layer]


def planned(source: Source, recipe: Mapping[str, Any] | None, asked: int | str) -> Plan | None:
    """Plan for the `experts_memory` of `from_pretrained`; None where all experts are in memory.

    For AUTO, a line on stderr says what was chosen.

    Raises: ValueError for another text, a memory that is too small, and a model without experts.
    """
    if asked == AUTO:
        plan, why = _automatic(source, recipe)
        print(f"torch_moe_mps: experts_memory {AUTO}: {why}", file=sys.stderr)
        return plan
    memory = bytes_in(str(asked))
    if memory is None or isinstance(asked, bool):
        expected = f'bytes, a text such as "20GB", or "{AUTO}"'
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {asked!r}")
    layers = layers_of(model := placed(source, recipe))
    slots, least = slots_in(layers, memory), _chosen(model)
    if slots < least:
        expected = f"at least {least_memory(layers, least) / 1e9:.3g} GB, for a token's {least} experts"
        got = f"{memory / 1e9:.3g} GB"
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {got}")
    return None if slots >= most_experts(layers) else Plan(memory, slots, layers)


def _automatic(source: Source, recipe: Mapping[str, Any] | None) -> tuple[Plan | None, str]:
    """Plan, or None, and why."""
    model, limit = placed(source, recipe), memory_for_models(torch.backends.mps.is_available())
    experts, weights = [*experts_of(model).values()], total_bytes(model)
    if not experts:
        return None, f"{type(model).__name__} has no experts"
    memory = room_for_experts(model, weights, sum(map(total_bytes, experts)), limit)
    sizes = f"{weights / 1e9:.2f} GB of weights, {limit / 1e9:.2f} GB of memory"
    if memory is None:
        return None, f"all experts are in memory: {sizes}"
    layers = layers_of(model)
    if (slots := slots_in(layers, memory)) < _chosen(model):
        return None, f"all experts are in memory, as those of a token do not fit beside the rest: {sizes}"
    if (why := _why_not_written(source, recipe, layers)) is not None:
        return None, f"all experts are in memory: {sizes}, but {why}"
    why = f"{memory / 1e9:.2f} GB of experts are in memory, the others on the disk: {sizes}"
    return Plan(memory, slots, layers), why


def _chosen(model: nn.Module) -> int:
    """How many experts a token has, which must be in memory at once."""
    return top_k(next(iter(experts_of(model).values())))


def _why_not_written(source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer]) -> str | None:
    """Why a file of experts is not there and cannot be written; None if it is, or can be."""
    folder, size = path_of(source).parent, size_of_file(layers)
    try:
        found = _found(source, recipe, layers)
    except (OSError, ValueError) as error:
        return str(error)
    if found is None and not os.access(folder, os.W_OK):
        return f"{folder} cannot be written"
    if found is None and shutil.disk_usage(folder).free < size:
        return f"{folder} has no {size / 1e9:.2f} GB of free space"
    return None


def _files(source: Source) -> list[str]:
    """The files of weights; they are downloaded if they are not here."""
    if source.gguf is not None:
        return [str(Path(source.path) / source.gguf)]
    source.check_files()
    return [str(file) for file in checkpoint_files(source.folder)]


def _key(source: Source, files: list[str], recipe: Mapping[str, Any] | None) -> str:
    """Digest of what a file of experts depends on: a sample of each tensor, the recipe, and the dtype."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(_sample_of_gguf(file) if source.gguf is not None else sample_of(file))
    digest.update(json.dumps([recipe, str(source.skeleton().dtype)], sort_keys=True).encode())
    return digest.hexdigest()


def _sample_of_gguf(path: str) -> bytes:
    """Samples at even distances: its header is among the first."""
    size = Path(path).stat().st_size
    with open(path, "rb", buffering=0) as file:
        parts = [size.to_bytes(8, "little"), file.read(1 << 20)]
        for place in range(0, size, max(1, size >> 12)):
            file.seek(place)
            parts.append(file.read(64))
    return b"".join(parts)


def _layer(name: str, module: Experts) -> Layer:
    tensors = tensors_of(module)
    shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}
    formats = [vars(module).get(attribute) for attribute in _FORMATS] if is_quantized(module) else []
    about = {"formats": [None if format is None else str(format) for format in formats]}
    return Layer(name, len(next(iter(tensors.values()))), shapes, about)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors [experts, ...] of an experts module."""
    own = {**module._parameters, **module._buffers}
    tensors = {name: tensor for name, tensor in own.items() if tensor is not None}
    count = next(len(tensor) for tensor in tensors.values() if tensor.dim() == 3)
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() and len(tensor) == count}


class OnDiskLoading:
    """Loading of a model whose experts stay on the disk.

    Args:
        source: the checkpoint.
        recipe: arguments of `accelerate`, or None.
        plan: which experts are in memory.

    Raises: as `experts_file`.
    """

    def __init__(self, source: Source, recipe: Mapping[str, Any] | None, plan: Plan):
        self.slots = plan.slots
        self.file = experts_file(source, recipe, plan.layers)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with cutting(self._cut):
            yield

    def finish(self, model: Any) -> None:
        pass

    def _cut(self, model: Any, device: torch.device) -> Callable[[], None]:
        """Takes the experts out of a model; what is returned puts them back, on the disk."""
        of_layers = {layer.name for layer in self.file.layers if layer.experts > self.slots}
        experts = {name: module for name, module in experts_of(model).items() if name in of_layers}
        for name in experts:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Module())
        ignored = {rf"^{re.escape(name)}\." for name in experts}
        ignored |= {*(model._keys_to_ignore_on_load_unexpected or ())}
        model._keys_to_ignore_on_load_unexpected = ignored

        def complete() -> None:
            pools = Pools(self.file, self.slots, device)
            for number, pool in enumerate(pools.layers):
                module = experts[pool.about.name]
                _install(module, pool.about, pool.tensors)
                put_on_disk(module, pools, number)
                owner, _, last = pool.about.name.rpartition(".")
                setattr(model.get_submodule(owner), last, module)
            keep_whole(model, [*experts.values()])

        return complete


def _install(module: Any, layer: Layer, tensors: dict[str, Tensor]) -> None:
    """Makes an experts module without weights one with those of a pool."""
    dense = {*projections(module)}
    for name in [*module._parameters]:
        owner = name.removesuffix("_bias")
        if name in tensors or owner in dense or name.rpartition("_")[2] in TENSORS:
            del module._parameters[name]
    for name in dense:
        vars(module).pop(name, None)
    give_weights(module, tensors)
    formats = [None if name is None else Format.named(name) for name in layer.about["formats"]]
    module.__dict__.update(zip(_FORMATS, formats, strict=False), config=pinned_config(module))
    module._is_hf_initialized = True
