"""Finds the tensors of a model in the files of its checkpoint, for reading without transformers' loader."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..disk.file import Layer, dtype_of
from ..disk.stored import FileRows, StoredTensor
from ..models.upstream.weights import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from .layouts.files import TensorPlace, places_in
from .own.reading import OwnLayout

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I32": torch.int32
}  # fmt: skip


def rows_of(
    model: Any, quantizer: Any, conversions: Sequence[Any], files: Sequence[str], layers: Sequence[Layer]
) -> list[dict[str, StoredTensor]] | None:
    """The tensors of some layers in the files; None where their rows are not what the model will have.

    Args:
        model: on the meta device, with the weights of the layers.
        quantizer: of the checkpoint, before it has placed weights; None for none.
        conversions: of the weights in the files.
    """
    if quantizer is not None:
        if type(quantizer.layout) is not OwnLayout:
            return None
        if {layer.name for layer in layers} & {*quantizer.wanted}:
            return None
    wanted = {f"{layer.name}.{name}" for layer in layers for name in layer.tensors}
    found = _found(model, conversions, files, wanted)
    if found.keys() != wanted:
        return None
    result: list[dict[str, StoredTensor]] = [{} for _ in layers]
    for layer, of_layer in zip(layers, result, strict=True):
        for (name, (dtype, _)), size in zip(layer.tensors.items(), layer.sizes, strict=True):
            rows = _rows(found[f"{layer.name}.{name}"], size)
            if rows is None or sum(part.rows for part in rows.parts) != layer.experts:
                return None
            if not _is_read_as(rows.dtype, dtype_of(dtype)):
                return None
            of_layer[name] = rows
    return result


def names_of_keys(
    model: Any, conversions: Sequence[Any], keys: Iterable[str]
) -> Iterable[tuple[str, str, Any]]:
    """(key in a file, name in the model, the converter that makes the tensor or None)."""
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name = key
        yield key, name, next((c for c in converters if pattern in c.source_patterns), None)


def _found(
    model: Any, conversions: Sequence[Any], files: Sequence[str], wanted: set[str]
) -> dict[str, list[tuple[str, TensorPlace]]]:
    """{name of a tensor: (file, place) of its parts, in order} of the wanted ones whose bytes stay."""
    parts, changed = defaultdict(list), set()
    for file in files:
        places = places_in(file)
        for key, name, converter in names_of_keys(model, conversions, places):
            if name not in wanted:
                continue
            if not all(map(_keeps_bytes, [] if converter is None else converter.operations)):
                changed.add(name)
            parts[name].append((key, file, places[key]))
    return {
        name: [(file, place) for _, file, place in sorted(entries, key=lambda part: dot_natural_key(part[0]))]
        for name, entries in parts.items()
        if name not in changed
    }


def _keeps_bytes(operation: Any) -> bool:
    if type(operation) is Concatenate:
        return operation.dim == 0
    return getattr(operation, "keeps_bytes", False)


def _rows(parts: Sequence[tuple[str, TensorPlace]], size: int) -> StoredTensor | None:
    """A tensor whose rows have so many bytes; None for parts of others."""
    dtypes = {place.dtype for _, place in parts}
    if len(dtypes) > 1 or not dtypes <= _DTYPES.keys() or any(place.size % size for _, place in parts):
        return None
    file_rows = [FileRows(file, place.offset, place.size // size) for file, place in parts]
    return StoredTensor(file_rows, _DTYPES[dtypes.pop()])


def _is_read_as(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True for equal dtypes, for codes, and for 16 bits that become others where they are."""
    if stored.is_floating_point and wanted.is_floating_point:
        return stored.itemsize == wanted.itemsize
    return stored == wanted or not (stored.is_floating_point or wanted.is_floating_point)
