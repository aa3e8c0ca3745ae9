"""Models whose experts stay on the disk: the file of their experts, and loading beside it."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._progress import with_progress
from ..._text import bytes_in
from ...disk.file import ExpertsFile, Layer, size_of_file, written
from ...disk.pool import Pools, Tables, least_memory, most_experts, slots_in
from ...disk.stored import StoredExperts
from ...macs import memory_for_models
from ...quantization import TENSORS, Format
from ..basics.interface import Experts, experts_of, is_quantized, projections
from ..modules.experts import pinned_config
from ..modules.experts_on_disk import (
    TURNED,
    OnDisk,
    give_weights,
    keep_whole,
    put_on_disk,
    put_table_on_disk,
    turned,
)
from .cutting import cutting
from .layouts.files import checkpoint_files, sample_of
from .quantize.sizes import large_tables, room_for_experts, top_k, total_bytes
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
    if (found := _found(source, recipe, layers, key)) is not None:
        return found
    print(f"torch_moe_mps: writing {path}, {size_of_file(layers) / 1e9:.2f} GB, once", file=sys.stderr)
    how: dict[str, Any] = {name: source.others.get(name) or usual for name, usual in _OPTIONS.items()}
    model_class = source.cls if isinstance(source.cls, type) else None
    checkpoint = files[0] if source.gguf is not None else source.folder
    with (
        written(path, key, layers) as new,
        Parts(checkpoint, model_class=model_class, recipe=recipe, **how) as parts,
    ):
        for number in with_progress(new.left.copy(), "Writing experts", "layer", len(layers) - len(new.left)):
            name = layers[number].name
            with parts.loaded(name):
                new.add(number, turned(layers[number], tensors_of(parts.model.get_submodule(name))))
    return ExpertsFile(path, key)


_OPTIONS = {"dtype": "auto", "trust_remote_code": False}


def _found(
    source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer], key: str
) -> ExpertsFile | StoredExperts | None:
    """The experts, if they can be read without writing anything. Raises: ValueError for another's file."""
    path = path_of(source)
    if path.exists():
        if (file := ExpertsFile(path, key)).layers != layers:
            raise ValueError(f"{path} has its experts for another device: remove it")
        return file
    return None if any(layer.about.get(TURNED) for layer in layers) else _stored(source, recipe, layers, key)


def _stored(
    source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer], key: str
) -> StoredExperts | None:
    """Layers in the checkpoint's own files; None where these have other bytes than the model will."""
    if source.gguf is not None:
        return None
    (model, quantizer), files = _dense(source, recipe), _files(source)
    if quantizer is None and source.stored:
        return None
    rows = rows_of(model, quantizer, files, layers)
    if rows is None:
        return None
    return StoredExperts(path_of(source).parent, key, layers, rows)


def placed(source: Source, recipe: Mapping[str, Any] | None) -> Any:
    """A checkpoint's model on the meta device, with the weights that it will have."""
    model, quantizer = _dense(source, recipe)
    if quantizer is not None:
        quantizer.place_empty(model, lambda name: True)
    return model


def _dense(source: Source, recipe: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """A checkpoint's dense model on the meta device, and its quantizer, which has placed nothing yet."""
    model = source.skeleton()
    return model, quantizer_for(source, model, _files(source), recipe)


def layers_of(model: nn.Module, on_mps: bool = False) -> list[Layer]:
    """The layers of the experts of a model, by `placed`. Raises: ValueError if there are none."""
    result = [_layer(name, module, on_mps) for name, module in experts_of(model).items()]
    if not result:
        expected = "for a model whose experts have transformers' interface"
        got = type(model).__name__
        raise ValueError(f"moe_mps::from_pretrained: experts_memory is {expected}, got {got}")
    return result


class Plan(NamedTuple):
    """Parts of a model that are on the disk.

    Attributes:
        memory: bytes of the experts in memory.
        slots: of each layer, in that memory; layers that have no more experts are in memory.
        layers: the model's.
        tables: embeddings that are too large for memory; None for none.
        model: on the meta device.
    """

    memory: int
    slots: int
    layers: list[Layer]
    tables: StoredExperts | None
    model: Any


def planned(source: Source, recipe: Mapping[str, Any] | None, asked: int | str | Plan) -> Plan | None:
    """Plan for the `experts_memory` of `from_pretrained`; None where all is in memory.

    For AUTO, a line on stderr says what was chosen. A plan that a command has made stays.

    Raises: ValueError for another text, a memory that is too small, and a model without experts.
    """
    if isinstance(asked, Plan):
        return asked
    if asked == AUTO:
        plan, why = _automatic(source, recipe)
        print(f"torch_moe_mps: experts_memory {AUTO}: {why}", file=sys.stderr)
        return plan
    memory = bytes_in(str(asked))
    if memory is None or isinstance(asked, bool):
        expected = f'bytes, a text such as "20GB", or "{AUTO}"'
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {asked!r}")
    layers = layers_of(model := placed(source, recipe), _on_mps(source))
    slots, least = slots_in(layers, memory), _chosen(model)
    if slots < least:
        expected = f"at least {least_memory(layers, least) / 1e9:.3g} GB, for a token's {least} experts"
        got = f"{memory / 1e9:.3g} GB"
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {got}")
    tables = _tables(source, recipe, model, _limit())
    if slots >= most_experts(layers) and tables is None:
        return None
    return Plan(memory, slots, layers, tables, model)


def _automatic(source: Source, recipe: Mapping[str, Any] | None) -> tuple[Plan | None, str]:
    """Plan, or None, and why."""
    model, limit = placed(source, recipe), _limit()
    experts, weights = [*experts_of(model).values()], total_bytes(model)
    if not experts:
        return None, f"{type(model).__name__} has no experts"
    tables = _tables(source, recipe, model, limit)
    rows = 0 if tables is None else sum(each.experts * sum(each.sizes) for each in tables.layers)
    memory = room_for_experts(model, weights, sum(map(total_bytes, experts)), rows, limit)
    sizes = f"{weights / 1e9:.2f} GB of weights, {limit / 1e9:.2f} GB of memory"
    if memory is None:
        return None, f"all experts are in memory: {sizes}"
    layers = layers_of(model, _on_mps(source))
    if (slots := slots_in(layers, memory)) < _chosen(model):
        return None, f"all experts are in memory, as those of a token do not fit beside the rest: {sizes}"
    if slots < most_experts(layers) and (why := _why_not_written(source, recipe, layers)) is not None:
        return None, f"all experts are in memory: {sizes}, but {why}"
    disk = f"the others and {rows / 1e9:.2f} GB of embeddings" if rows else "the others"
    why = f"{memory / 1e9:.2f} GB of experts are in memory, {disk} on the disk: {sizes}"
    return Plan(memory, slots, layers, tables, model), why


def _on_mps(source: Source) -> bool:
    return "mps" in str(source.others.get("device_map"))


def _limit() -> int:
    return memory_for_models(torch.backends.mps.is_available())


def _tables(
    source: Source, recipe: Mapping[str, Any] | None, model: nn.Module, limit: int
) -> StoredExperts | None:
    """Embeddings that are too large for memory, where the checkpoint's files have their rows."""
    every = {name: model.get_submodule(name) for name in large_tables(model, limit)}
    plain = {name: module for name, module in every.items() if getattr(module, "scale", None) is None}
    layers = [_layer_of_rows(name, module) for name, module in plain.items()]
    return _stored(source, recipe, layers, _key(source, _files(source), recipe)) if layers else None


def _chosen(model: nn.Module) -> int:
    """How many experts a token has, which must be in memory at once."""
    return top_k(next(iter(experts_of(model).values())))


def _why_not_written(source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer]) -> str | None:
    """Why a file of experts is not there and cannot be written; None if it is, or can be."""
    folder, size = path_of(source).parent, size_of_file(layers)
    try:
        found = _found(source, recipe, layers, _key(source, _files(source), recipe))
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


def _layer(name: str, module: Experts, on_mps: bool) -> Layer:
    """The layer of an experts module; its matrices lie on mps as its kernels read them (`align_weights`)."""
    tensors = tensors_of(module)
    formats = [vars(module).get(attribute) for attribute in _FORMATS] if is_quantized(module) else []
    about: dict[str, Any] = {"formats": [None if format is None else str(format) for format in formats]}
    if on_mps and module.is_transposed and not formats:
        about[TURNED] = [*projections(module)]
    layer = Layer(name, len(next(iter(tensors.values()))), {}, about)
    return replace(layer, tensors=_shapes(turned(layer, tensors)))


def _layer_of_rows(name: str, table: Any) -> Layer:
    tensors, count = {**table._parameters, **table._buffers}, table.num_embeddings
    return Layer(
        name, count, _shapes({n: t for n, t in tensors.items() if t is not None and len(t) == count})
    )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)} of one row."""
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}


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
        self.slots, self._layers, self._tables, self._model = plan[1:]
        whole = plan.slots >= most_experts(plan.layers)
        self._file = None if whole else experts_file(source, recipe, plan.layers)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with cutting(self._cut):
            yield

    def finish(self, model: Any) -> None:
        pass

    def _cut(self, model: Any, device: torch.device) -> Callable[[], None]:
        """Takes the experts out of a model; what is returned puts them back, on the disk."""
        large = {layer.name for layer in self._layers if layer.experts > self.slots}
        experts = {name: module for name, module in experts_of(model).items() if name in large}
        tables = [] if self._tables is None else [table.name for table in self._tables.layers]
        for name in [*experts, *tables]:
            _put(model, name, nn.Module())
        ignored = {rf"^{re.escape(name)}\." for name in [*experts, *tables]}
        ignored |= {*(model._keys_to_ignore_on_load_unexpected or ())}
        model._keys_to_ignore_on_load_unexpected = ignored

        def complete() -> None:
            kept: list[nn.Module] = [*experts.values()]
            if self._file is not None:
                pools = Pools(self._file, self.slots, device)
                for pool in pools.layers:
                    _install(module := experts[pool.about.name], pool.about, turned(pool.about, pool.tensors))
                    put_on_disk(module, OnDisk(pool, pools))
                    _put(model, pool.about.name, module)
            if self._tables is not None:
                of_tables = Tables(self._tables, device)
                for pool in of_tables.layers:
                    kept.append(table := self._model.get_submodule(pool.about.name))
                    give_weights(table, pool.tensors)
                    table._apply(
                        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
                    )
                    put_table_on_disk(table, OnDisk(pool, of_tables))
                    _put(model, pool.about.name, table)
            keep_whole(model, kept)

        return complete


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


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
