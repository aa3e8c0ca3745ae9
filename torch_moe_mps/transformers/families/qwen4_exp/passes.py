"""Tables of the whole context, which the indexer makes, and of which most layers read those of new tokens."""

from typing import Any

from torch import fx

from ...graphs.nodes import arguments, aten, calls, changed, is_call, is_final, ours, put, tensor_of
from ...graphs.tracing import ITEM, VALUE


def tables_of_slices(graph: fx.Graph) -> None:
    """slice(rope_tables(P)) -> rope_tables(slice(P)), where nobody reads the rows of other tokens."""
    for call in calls(graph, ours.rope_tables):
        positions = arguments(call)["position_ids"]
        readers = [reader for table in call.users for reader in table.users]
        if not is_final(call) or not all(_shows_tokens(reader) for reader in readers):
            continue
        for reader in readers:
            table: Any = reader.args[0]
            value = tensor_of(reader)
            made = changed(call, call, position_ids=_sliced(positions, reader, call))
            made.meta[VALUE] = [value.new_empty(value.shape) for _ in call.meta[VALUE]]
            number = table.args[1]
            reader.replace_all_uses_with(put(call, ITEM, made.meta[VALUE][number], made, number))


def _shows_tokens(reader: fx.Node) -> bool:
    return is_call(reader, aten.slice) and arguments(reader)["dim"] == 1


def _sliced(positions: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node:
    """The positions of tokens whose tables a slice shows, in front of a node."""
    count, old = tensor_of(like).shape[1], tensor_of(positions)
    _, _, first, last, step = arguments(like).values()
    value = old.new_empty_strided((*old.shape[:-1], count), (*old.stride()[:-1], old.stride(-1) * step))
    return put(before, aten.slice.Tensor, value, positions, old.dim() - 1, first, last, step)
