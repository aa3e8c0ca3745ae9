"""The streams of hyper-connections between two layers."""

from torch import fx

from ..nodes import arguments, calls, is_call, is_unchanged, ours, put, tensor_of
from ..tracing import ITEM, VALUE


def update_in_connections(graph: fx.Graph) -> None:
    """_hyper_connection(_hyper_update(S, OUT)) -> _hyper_connection(S, block_out=OUT), which gives both"""
    for call in calls(graph, ours._hyper_connection):
        passed = arguments(call)
        update = passed["streams"]
        if not is_call(update, ours._hyper_update) or passed["block_out"] is not None:
            continue
        if any(user < call for user in update.users):
            continue
        if all(is_unchanged(node, update, call) for node in update.all_input_nodes):
            values = [*call.meta[VALUE][:-1], tensor_of(update)]
            both = put(call, call.target, values, **passed | arguments(update))
            update.replace_all_uses_with(put(call, ITEM, values[-1], both, len(values) - 1))
            call.replace_all_uses_with(both)
