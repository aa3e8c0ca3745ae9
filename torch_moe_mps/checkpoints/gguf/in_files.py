"""Where experts, or rows of embeddings, lie in a GGUF file, for reading them as they are needed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...disk.file import Layer
from ...disk.stored import VALUES, FileBlocks, bytes_of_block
from ..quantize.weights import quantized_names
from .file import GgufTensor
from .reading import GgufLayout

_MOST_RUNS = 8  # reads of a matrix: interleaved halves are two


class _Run(NamedTuple):
    """Rows of a tensor, from `begin` of each expert on, which become rows `first + n * step`."""

    tensor: GgufTensor
    each: int  # rows of an expert in the tensor
    begin: int
    rows: int
    first: int
    step: int


def blocks_of(layout: GgufLayout, layers: Sequence[Layer]) -> list[list[FileBlocks]] | None:
    """The blocks of each layer; None where a tensor of one is not made of rows of the file."""
    result = []
    for layer in layers:
        every = [*_parts(layout, layer)]
        if not all(every):
            return None
        result.append([block for blocks in every for block in blocks])
    return result


def _parts(layout: GgufLayout, layer: Layer) -> Iterator[list[FileBlocks]]:
    """Yields the blocks of each parameter of a layer, none for one that is not made of rows of the file."""
    target, rest = layout.targets.get(layer.name), [*layer.tensors]
    for parameter in () if target is None else target.formats:
        names = tuple(name for name in quantized_names(parameter) if name in layer.tensors)
        rest = [name for name in rest if name not in names]
        weight = layout.sources.get(f"{layer.name}.{parameter}")
        if weight is None or weight.moves_columns:
            yield []
        else:
            yield _blocks(weight.tensors, weight.order, layer.experts, names)
    for name in rest:
        yield _dense(layout, layer, name)


def _dense(layout: GgufLayout, layer: Layer, name: str) -> list[FileBlocks]:
    """The blocks of a tensor that is not quantised, of which each is a value."""
    path = f"{layer.name}.{name}"
    tensors = layout.file.parts.get(path, [])
    if not tensors or any(tensor.kind.lower() not in VALUES for tensor in tensors):
        return []
    order = layout.file.order(path)
    if order is not None and order.rows.dim() > 1:
        is_transposed = order.is_transposed == (name in layer.transposed)
        return _blocks(tensors, order.rows, layer.experts, (name,)) if is_transposed else []
    values = layout.file.order_of_values(path)  # a bias has no rows
    return [] if values is None else _blocks(tensors, values, layer.experts, (name,), by_value=True)


def _blocks(
    tensors: Sequence[GgufTensor], order: Tensor, experts: int, names: tuple[str, ...], by_value: bool = False
) -> list[FileBlocks]:
    """The blocks of a parameter; none where experts differ in their rows.

    Args:
        order: index of each row of the parameter among those of all tensors; or of each value.
    """
    result = []
    for run in _runs(tensors, order.reshape(experts, -1), by_value) if order.numel() % experts == 0 else ():
        tensor, kind = run.tensor, run.tensor.kind.lower()
        block = bytes_of_block(kind)
        size = block if by_value else tensor.data.shape[-1]  # bytes of a row
        offset = tensor.offset + run.begin * size
        place = offset, run.each * size, run.rows, size // block
        result.append(FileBlocks(kind, tensor.path, *place, names, run.first, run.step))
    return result


def _runs(tensors: Sequence[GgufTensor], order: Tensor, by_value: bool) -> list[_Run]:
    """The rows of each tensor in runs, which are the same for all experts; none where there are too many."""
    result, base, experts = list[_Run](), 0, len(order)
    for tensor in tensors:
        count = tensor.rows * (tensor.shape[-1] if by_value else 1)
        each = count // experts
        is_of = (order >= base) & (order < base + count)
        own = order - base - each * torch.arange(experts).unsqueeze(1)
        inside = own[0][is_of[0]]
        same = torch.equal(is_of, is_of[:1].expand_as(is_of)) and torch.equal(
            own[is_of].view(experts, -1), inside.expand(experts, -1)
        )
        if count % experts or not same or bool(((inside < 0) | (inside >= each)).any()):
            return []
        by_source, targets = inside.argsort(), is_of[0].nonzero().flatten()
        sources, places = inside[by_source].tolist(), targets[by_source].tolist()
        begin = 0
        while begin < len(sources):
            step = places[begin + 1] - places[begin] if begin + 1 < len(sources) else 1
            end = begin + 1
            while end < len(sources) and (sources[end], places[end]) == (
                sources[begin] + end - begin,
                places[begin] + step * (end - begin),
            ):
                end += 1
            result.append(_Run(tensor, each, sources[begin], end - begin, places[begin], step))
            begin = end
        base += count
    return result if len(result) <= _MOST_RUNS else []
