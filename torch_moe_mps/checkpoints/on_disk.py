"""Models whose experts stay on the disk: the file of their experts, and loading beside it."""

import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._progress import with_progress
from .._text import bytes_in, shown
from ..disk.file import ExpertsFile, Layer, written
from ..disk.pool import Pools, least_memory, most_experts, slots_in
from ..disk.stored import BlockExperts, StoredExperts
from ..macs import memory_for_models
from ..models.basics.interface import (
    count_of,
    experts_of,
    formats_of,
    is_quantized,
    is_transposed,
    projections,
)
from ..models.modules.experts import pinned_config
from ..models.modules.experts_on_disk import (
    OnDisk,
    give_weights,
    keep_whole,
    put_on_disk,
    put_table_on_disk,
    transposed,
)
from ..models.modules.stacked_experts import run_operators
from .cutting import cutting
from .gguf.in_files import blocks_of
from .quantize.sizes import (
    bytes_of_experts,
    large_tables,
    memory_for_slots,
    room_for_experts,
    top_k,
    total_bytes,
)
from .quantizer import quantizer_for
from .rows import rows_of
from .source import Source
from .write.parts import Parts

AUTO = "auto"
_MOST = 1 << 60  # bytes: more than any memory
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # names of tensors begin so
NAME = "experts.moe_mps"  # the file beside a checkpoint's


def path_of(source: Source) -> Path:
    """The file of the experts of a checkpoint, beside its files."""
    if source.gguf is not None:
        return Path(f"{source.file}.{NAME}")
    variant = source.others.get("variant")
    return Path(source.folder, NAME if variant is None else f"{variant}.{NAME}")


def experts_file(
    source: Source, recipe: Mapping[str, Any] | None, model: nn.Module, layers: list[Layer]
) -> ExpertsFile | StoredExperts:
    """Experts as `from_pretrained` would load them: in the checkpoint's own files, or in a file of them.

    That is written first unless it is there; one layer at a time is in memory.

    Args:
        recipe: arguments of `accelerate`, by which weights are quantised.
        model, layers: by `placed` and `layers_of`.

    Raises: ValueError for a file of another checkpoint or recipe, or without space on the disk; OSError.
    """
    path, key, named = path_of(source), _key(source, model), _named(model, layers)
    # Blocks of a GGUF file are read in place, also if an earlier release wrote a file of what they hold.
    may_be_stored = source.gguf is not None or not path.exists()
    if may_be_stored and (stored := _stored(source, recipe, layers, key)) is not None:
        return stored
    if not path.exists():
        _write_file(path, key, source, recipe, layers, named)
    if (file := ExpertsFile(path, key, source.files)).layers != named:
        raise ValueError(f"{path} has its experts for another device or class: remove it")
    file.layers = layers
    return file


def _named(model: Any, layers: Sequence[Layer]) -> list[Layer]:
    """Layers by the names in their decoder: the classes of a checkpoint have one file."""
    return [replace(layer, name=_in_decoder(model, layer.name)) for layer in layers]


def _in_decoder(model: Any, name: str) -> str:
    prefix = model.base_model_prefix
    return name.removeprefix(f"{prefix}.") if hasattr(model, prefix) else name


def _write_file(
    path: Path,
    key: str,
    source: Source,
    recipe: Mapping[str, Any] | None,
    layers: list[Layer],
    named: list[Layer],
) -> None:
    """Writes the file of experts, a layer at a time, as `from_pretrained` would load them.

    Args:
        named: the layers as the file names them.
    """
    with written(path, key, named, source.files) as new, Parts(source, recipe=recipe) as parts:
        places = [parts.part_of(f"{layer.name}.weight") for layer in layers]
        groups = [[*numbers] for _, numbers in itertools.groupby(new.left.copy(), places.__getitem__)]
        for numbers in with_progress(groups, "Writing experts", "layer", len({*places}) - len(groups)):
            with parts.loaded(layers[numbers[0]].name):
                for number in numbers:
                    experts = parts.model.get_submodule(layers[number].name)
                    new.add(number, transposed(layers[number], tensors_of(experts)))


def _stored(
    source: Source, recipe: Mapping[str, Any] | None, layers: list[Layer], key: str
) -> StoredExperts | None:
    """Layers in the checkpoint's own files; None where these have other bytes than the model will."""
    is_gguf = source.gguf is not None
    if (is_gguf and recipe is not None) or (not is_gguf and any(layer.transposed for layer in layers)):
        return None
    model, quantizer = _dense(source, recipe)
    if is_gguf:
        blocks = blocks_of(quantizer.layout, layers)
        return None if blocks is None else BlockExperts(Path(source.file), key, layers, blocks)
    if quantizer is None and source.stored:
        return None
    rows = rows_of(model, quantizer, source.conversions(model, quantizer), source.files, layers)
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
    source.settle_dtype()
    model = source.skeleton()
    return model, quantizer_for(source, model, source.files, recipe)


def layers_of(model: nn.Module, has_rows: bool = False) -> list[Layer]:
    """The layers of the experts of a model, by `placed`.

    Args:
        has_rows: whether the rows of dense experts lie in memory as [outputs, inputs] in every class.

    Raises: ValueError if there are none.
    """
    result = [_layer(name, module, has_rows) for name, module in experts_of(model).items()]
    if not result:
        expected = "for a model whose experts have transformers' interface"
        got = type(model).__name__
        raise ValueError(f"moe_mps::from_pretrained: experts_memory is {expected}, got {got}")
    return result


class DiskPlan(NamedTuple):
    """Parts of a model that are on the disk.

    Attributes:
        slots: of each layer; layers that have no more experts are in memory.
        layers: the model's.
        tables: embeddings that are too large for memory; None for none.
        model: on the meta device.
    """

    slots: int
    layers: list[Layer]
    tables: StoredExperts | None
    model: Any

    @property
    def on_disk(self) -> list[str]:
        """Names of the layers whose experts are not all in memory."""
        return [layer.name for layer in self.layers if layer.experts > self.slots]


def planned(source: Source, recipe: Mapping[str, Any] | None, asked: int | str | DiskPlan) -> DiskPlan | None:
    """Plan for the `experts_memory` of `from_pretrained`; None where all is in memory.

    For AUTO, a line on stderr says what was chosen. A plan that a command has made stays.

    Raises: ValueError for another text, a memory that is too small or larger than the GPU's, a device
        without memory, and a model without experts.
    """
    if isinstance(asked, DiskPlan):
        return asked
    memory = None if asked == AUTO else _requested_memory(asked)
    model = placed(source, recipe)
    if memory is None and not experts_of(model):
        _print_choice(f"{type(model).__name__} has no experts")
        return None
    weights = _weights_of(source, recipe, model)
    slots = _slots_by_room(weights) if memory is None else _slots_by_memory(weights, memory)
    if slots is None:
        return None
    plan = DiskPlan(slots, weights.layers, weights.tables, model)
    if not plan.on_disk and plan.tables is None:
        return None
    _require_one_device(source.others.get("device_map"))
    return plan


def memories_to_compare(source: Source, recipe: Mapping[str, Any] | None) -> list[int]:
    """Half, once and one and a half times the `experts_memory` of AUTO, in bytes, as far as they fit.

    Where all weights fit, two thirds of the experts stand for it. Empty for a model without experts, and for
    one whose file of experts is not written.
    """
    model = placed(source, recipe)
    if not experts_of(model):
        return []
    weights = _weights_of(source, recipe, model)
    if not path_of(source).exists() and _stored(source, recipe, weights.layers, _key(source, model)) is None:
        return []
    if (room := weights.room) is None:
        room = least_memory(weights.layers, most_experts(weights.layers))
        sizes = room // 3, 2 * room // 3, room
    else:
        chosen = memory_for_slots(weights.experts, room, weights.least)
        sizes = chosen // 2, chosen, 3 * chosen // 2
    return sorted({max(weights.least, min(room, size)) for size in sizes if room >= weights.least})


def _requested_memory(asked: int | str) -> int:
    """Bytes that `experts_memory` asks for. Raises: ValueError."""
    memory = bytes_in(str(asked)) if not isinstance(asked, int) or asked < _MOST else _MOST
    if memory is None or isinstance(asked, bool):
        expected = f'bytes, a text such as "20GB", or "{AUTO}"'
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {shown(asked)}")
    return memory


class _Weights(NamedTuple):
    """Weights of a model that is to be read, in bytes.

    Attributes:
        model: on the meta device.
        layers, tables: as in a DiskPlan.
        total, experts: of all weights, and of the experts among them.
        rows: of the tables.
        limit: of memory for the model.
        on_gpu: whether the model will be on mps.
    """

    model: Any
    layers: list[Layer]
    tables: StoredExperts | None
    total: int
    experts: int
    rows: int
    limit: int
    on_gpu: bool

    @property
    def least_slots(self) -> int:
        """Number of experts that a token is routed to."""
        return top_k(next(iter(experts_of(self.model).values())))

    @property
    def room(self) -> int | None:
        """Bytes for experts by `room_for_experts`."""
        return room_for_experts(self.model, self.total, self.experts, self.rows, self.limit)

    @property
    def least(self) -> int:
        """Bytes of the least memory for the experts."""
        return least_memory(self.layers, self.least_slots)

    @property
    def least_in_words(self) -> str:
        return f"{self.least / 1e9:.3g} GB, for a token's {self.least_slots} experts"

    def __str__(self) -> str:
        return f"{self.total / 1e9:.2f} GB of weights, {self.limit / 1e9:.2f} GB of memory"


def _weights_of(source: Source, recipe: Mapping[str, Any] | None, model: Any) -> _Weights:
    """The weights of a checkpoint's model. Raises: ValueError for a model without experts."""
    on_gpu = "mps" in str(source.others.get("device_map"))
    # On mps, kernels read experts by their outputs. The loader keeps those of a GGUF file as they lie there.
    layers = layers_of(model, has_rows=on_gpu or source.gguf is not None)
    limit = memory_for_models(torch.backends.mps.is_available())
    tables = _tables(source, recipe, model, limit)
    rows = 0 if tables is None else sum(each.experts * sum(each.sizes) for each in tables.layers)
    experts = sum(map(bytes_of_experts, experts_of(model).values()))
    return _Weights(model, layers, tables, total_bytes(model), experts, rows, limit, on_gpu)


def _slots_by_room(weights: _Weights) -> int | None:
    """Slots of each layer in the memory beside the other weights; None if all experts are in memory.

    A line on stderr says what was chosen.
    """
    room = weights.room
    if room is None:
        _print_choice(f"all experts are in memory: {weights}")
        return None
    memory = memory_for_slots(weights.experts, room, weights.least)
    slots = slots_in(weights.layers, memory)
    if slots < weights.least_slots:
        why = f"as the disk would need {weights.least_in_words}, beside the rest"
        _print_choice(f"all experts are in memory, {why}: {weights}")
        return None
    rows = weights.rows
    disk = f"the others and {rows / 1e9:.2f} GB of embeddings" if rows else "the others"
    _print_choice(f"{memory / 1e9:.2f} GB of experts are in memory, {disk} on the disk: {weights}")
    return slots


def _slots_by_memory(weights: _Weights, memory: int) -> int:
    """Slots of each layer in the memory that was requested.

    Raises: ValueError for a memory that is too small or larger than the GPU's.
    """
    slots, got = slots_in(weights.layers, memory), f"{memory / 1e9:.3g} GB"
    if slots < weights.least_slots:
        expected = f"at least {weights.least_in_words}"
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {got}")
    rest = weights.total - weights.rows - weights.experts
    if weights.on_gpu and least_memory(weights.layers, slots) + rest > weights.limit:
        room = max(0, weights.limit - rest)
        limits = f"at most {room / 1e9:.3g} GB, as the GPU may have {weights.limit / 1e9:.3g} GB"
        expected = f"{limits} and the other weights are {rest / 1e9:.3g} GB"
        raise ValueError(f"moe_mps::from_pretrained: experts_memory must be {expected}, got {got}")
    return slots


def _require_one_device(places: Any) -> None:
    """Raises: ValueError for a device_map of several devices, or with one that has no memory."""
    devices = sorted({*map(str, places.values() if isinstance(places, Mapping) else [places])})
    for is_wrong, expected in (
        (len(devices) > 1, "one device"),
        ({*devices} & {"meta", "disk"}, "a device with memory"),
    ):
        if is_wrong:
            expected = f"{expected} where experts are on the disk (experts_memory)"
            got = " and ".join(devices)
            raise ValueError(f"moe_mps::from_pretrained: device_map must be {expected}, got {got}")


def _print_choice(why: str) -> None:
    print(f"torch_moe_mps: experts_memory {AUTO}: {why}", file=sys.stderr)


def _tables(
    source: Source, recipe: Mapping[str, Any] | None, model: nn.Module, limit: int
) -> StoredExperts | None:
    """Embeddings that are too large for memory, where the checkpoint's files have their rows."""
    every = (_layer_of_rows(name, model.get_submodule(name)) for name in large_tables(model, limit))
    layers = [layer for layer in every if layer is not None]
    return _stored(source, recipe, layers, _key(source, model)) if layers else None


def _key(source: Source, model: Any) -> str:
    """Digest of all that the experts' file depends on, except the checkpoint's files."""
    formats = {
        _in_decoder(model, name): {part: format.name for part, format in formats_of(experts).items()}
        for name, experts in experts_of(model).items()
        if is_quantized(experts)
    }
    about = [source.stored, formats, str(model.config.dtype)]
    if (key_mapping := source.others.get("key_mapping")) is not None:
        about.append(key_mapping)
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _layer(name: str, module: nn.Module, has_rows: bool) -> Layer:
    """The layer of an experts module."""
    tensors = tensors_of(module)
    is_turned = has_rows and is_transposed(module) and not is_quantized(module)
    layer = Layer(name, count_of(module), {}, tuple(projections(module)) if is_turned else ())
    return replace(layer, tensors=_shapes(transposed(layer, tensors)))


def _layer_of_rows(name: str, table: Any) -> Layer | None:
    """The layer of an embedding; None for one with other tensors than rows, such as a scale."""
    tensors, count = {**table._parameters, **table._buffers}, table.num_embeddings
    rows = {n: t for n, t in tensors.items() if t is not None and t.numel()}
    is_plain = all(t.shape[:1] == (count,) for t in rows.values())
    return Layer(name, count, _shapes(rows)) if is_plain else None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype, shape)} of one row."""
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in tensors.items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors [experts, ...] of an experts module."""
    tensors, count = {**module._parameters, **module._buffers}, count_of(module)
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_OF_EXPERTS)}
    return {n: t for n, t in tensors.items() if t is not None and t.dim() and len(t) == count}


def reading_beside_the_disk(
    source: Source, recipe: Mapping[str, Any] | None, plan: DiskPlan
) -> AbstractContextManager[None]:
    """Block where `from_pretrained` reads a model but for what stays on the disk by a plan.

    Raises: as `experts_file`, before that.
    """
    experts = experts_file(source, recipe, plan.model, plan.layers) if plan.on_disk else None
    layers = [layer for layer in plan.layers if layer.name in plan.on_disk]
    layers += [] if plan.tables is None else plan.tables.layers

    def cut(model: Any, device: torch.device) -> Callable[[], None]:
        """Takes what stays on the disk out of a model. Returns: what puts slots in its place."""
        for layer in layers:
            rest = nn.Module()
            _move_rest(plan.model.get_submodule(layer.name), layer, model.get_submodule(layer.name), rest)
            _put(model, layer.name, rest)
        ignored = {rf"^{re.escape(layer.name)}\." for layer in layers}
        model._keys_to_ignore_on_load_unexpected = ignored | {
            *(model._keys_to_ignore_on_load_unexpected or ())
        }
        return functools.partial(_put_on_disk, model, device, plan, experts)

    return cutting(cut)


def _put_on_disk(
    model: Any, device: torch.device, plan: DiskPlan, experts: ExpertsFile | StoredExperts | None
) -> None:
    """Gives a model that was cut the modules of a plan, with slots in place of weights."""
    modules = []
    for file, slots, put in ((experts, plan.slots, put_on_disk), (plan.tables, None, put_table_on_disk)):
        if file is None:
            continue
        pools = Pools(file, slots, device)
        for pool in pools.layers:
            module: Any = plan.model.get_submodule(pool.about.name)
            _move_rest(module, pool.about, model.get_submodule(pool.about.name), module)
            give_weights(module, transposed(pool.about, pool.tensors))
            module._apply(lambda t: torch.empty_like(t, device=device) if not t.numel() else t)
            module._is_hf_initialized = True
            if slots is not None:
                module.config = pinned_config(module)
                run_operators(module)
            put(module, OnDisk(pool, pools))
            _put(model, pool.about.name, module)
            modules.append(module)
    keep_whole(model, modules)


def _move_rest(planned: nn.Module, layer: Layer, source: nn.Module, to: nn.Module) -> None:
    """Moves tensors of a planned module that are not on the disk, as of a router in it, to another module."""
    for path, _ in [*planned.named_parameters()]:
        first, is_below, _ = path.partition(".")
        if is_below:
            to._modules[first] = source._modules[first]
        elif path not in layer.tensors:
            to._parameters[path] = source._parameters[path]


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)
