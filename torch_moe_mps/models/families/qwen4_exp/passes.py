"""Tables of the whole context, which the indexer makes; most layers read the rows of new tokens;
and the mean over streams.
"""

from torch import fx

from ...graphs.fusion import Fusion
from ...graphs.nodes import arguments, aten, calls, changed, is_call, is_final, ours, put, tensor_of
from ...graphs.tracing import VALUE, as_recorded

mean_in_elements = Fusion(
    "mean_in_elements", ("mean(_pointwise(*A[S])[S], [-2])", "_pointwise(*A, mean=True)")
)


def tables_of_slices(graph: fx.Graph) -> None:
    """slice(view(_pointwise(P))) -> view(_pointwise(slice(P))), where nobody reads other tokens' rows."""
    for call in calls(graph, ours._pointwise):
        table = next(iter(call.users))
        is_table = len(call.users) == 1 and is_call(table, aten.view) and tensor_of(call).dim() == 4
        if not is_table or not is_final(call) or not all(map(_shows_tokens, table.users)):
            continue
        for reader in list(table.users):
            shape, of_pairs = tensor_of(reader).shape, tensor_of(call).shape[2:]
            passed = arguments(call).items()
            sliced = {name: _sliced(item, reader) for name, item in passed if _has_tokens(item)}
            new_call = changed(call, reader, **sliced)
            new_call.meta[VALUE] = tensor_of(call).new_empty((*shape[:2], *of_pairs))
            sizes = [as_recorded(size) for size in shape]
            value = tensor_of(reader).new_empty(shape)
            reader.replace_all_uses_with(put(reader, aten.view.default, value, new_call, sizes))


def _shows_tokens(reader: fx.Node) -> bool:
    return is_call(reader, aten.slice) and arguments(reader)["dim"] == 1


def _has_tokens(value: object) -> bool:
    """True if an input of a table has its positions, and not its frequencies."""
    return isinstance(value, fx.Node) and tensor_of(value).dim() == 4


def _sliced(positions: fx.Node, reader: fx.Node) -> fx.Node:
    """The positions of tokens whose tables a slice shows, in front of it."""
    _, _, first, last, step = arguments(reader).values()
    old, count = tensor_of(positions), tensor_of(reader).shape[1]
    batch, token, *rest = old.stride()
    value = old.new_empty_strided((old.shape[0], count, 1, 1), (batch, token * step, *rest))
    return put(reader, aten.slice.Tensor, value, positions, 1, first, last, step)
