"""Removal from a recorded graph of results that nobody reads, and of views that change nothing.

Operators that write are kept if anything reads their buffer; operators that draw random numbers are kept.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..nodes import arguments, aten, calls, is_call, is_final, is_view, memory_of, put, tensor_of, written
from ..tracing import ITEM, VALUE, Number, as_given, as_recorded, key_of

_ONE = 1, (aten.ones, aten.ones_like, aten.new_ones)
_ZERO = 0, (aten.zeros, aten.zeros_like, aten.new_zeros)
# {operator: (the number that changes nothing as an operand, the calls that make tensors of it)}
_NEUTRAL: dict[Any, tuple[int, tuple[Any, ...]]] = {
    aten.mul: _ONE,
    aten.bitwise_and: _ONE,
    aten.bitwise_or: _ZERO,
    aten.sub: _ZERO,
}


def drop_unused(graph: fx.Graph) -> None:
    """Drops calls whose results nobody reads."""
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and not _has_effects(node):
            graph.erase_node(node)


def make_new_tensors(graph: fx.Graph) -> None:
    """x.op_(Y) -> x.op(Y), which later calls read, of a tensor that no other one shows.

    Most patterns then need not ask when a value was changed.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        buffer, operator = node.args[0] if node.args else None, _out_of_place(node)
        if operator is None or not isinstance(buffer, fx.Node):
            continue
        if not _is_shown_by_none(buffer, [user for user in buffer.users if place[user] < place[node]]):
            continue
        index = arguments(node).get("index")
        values = [item for item in node.all_input_nodes if item is not index]
        if any(tensor_of(value).dtype != tensor_of(buffer).dtype for value in values):
            continue
        new = put(node, operator, tensor_of(buffer), *node.args, **node.kwargs)
        place[new] = now = place[node]
        graph.erase_node(node)
        for user in [user for user in buffer.users if place[user] > now]:
            user.replace_input_with(buffer, new)


def _is_shown_by_none(value: fx.Node, readers: list[fx.Node]) -> bool:
    """True for a tensor that a call has made, if no result of these readers lies in its memory."""
    memory = memory_of(value)
    if value.op != "call_function" or memory is not (value.args[0] if value.target is ITEM else value):
        return False  # it is a view
    return not any(memory_of(user) is memory for user in readers if not _out_of_place(user))


def positions_in_one(graph: fx.Graph) -> None:
    """arange(N) + START -> arange(START, START + N)"""
    for total in calls(graph, aten.add):
        count, start, alpha = arguments(total).values()
        if not is_call(count, aten.arange) or count.target is not aten.arange.default or alpha != 1:
            continue
        passed = arguments(count)
        end = _sum(start, passed.pop("end"))
        if end is not None and tensor_of(count).dtype == tensor_of(total).dtype == torch.int64:
            new = put(total, aten.arange.start, tensor_of(total), start, end, **passed)
            total.replace_all_uses_with(new)


def _sum(first: Any, second: Any) -> Any:
    """Sum of two integers, which may differ from call to call; None for anything else."""
    if not isinstance(first, (int, Number)) or not isinstance(second, (int, Number)):
        return None
    return as_recorded(as_given(first) + as_given(second))


def _out_of_place(node: fx.Node) -> Any:
    """The operator of aten that returns what a call writes over its first argument; None if there is none."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or not schema.name.endswith("_") or node.users:
        return None
    packet = getattr(torch.ops.aten, schema.name[6:-1], None)
    return getattr(packet, target._overloadname, None)


def drop_neutral(graph: fx.Graph) -> None:
    """X * 1, X - 0, X & True, X | False -> X: masks that hide nothing, scales that are not used."""
    for call in calls(graph, *_NEUTRAL):
        first, second, *_ = arguments(call).values()
        if is_call(call, aten.bitwise_and) and tensor_of(call).dtype != torch.bool:
            continue
        for x, other in ((first, second), (second, first))[: 1 if is_call(call, aten.sub) else 2]:
            if not isinstance(x, fx.Node) or memory_of(x).op != "call_function":
                continue
            if not (_is_neutral(other, call) and is_final(x) and is_final(call)):
                continue
            alike = key_of(tensor_of(x)) == key_of(tensor_of(call))
            if alike and not (_is_returned(x) and _is_returned(call)):
                call.replace_all_uses_with(x)
                break


def _is_neutral(value: Any, call: fx.Node) -> bool:
    """True if a call gives its other operand: for a number, or a tensor of it."""
    number, made_by = _NEUTRAL[getattr(call.target, "overloadpacket", None)]
    if not isinstance(value, fx.Node):
        return bool(value == number)
    while is_call(value, aten._to_copy) or _shows_numbers(value):
        value = value.args[0]
    return is_call(value, *made_by) and is_final(value)


def share_views(graph: fx.Graph) -> None:
    """Replaces a view by an earlier equal one, or by its base where the two are alike."""
    views: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_tensor_view(node):
            continue
        like = key_of(tensor_of(node))
        source = next((item for item in _shown(node) if key_of(tensor_of(item)) == like), None)
        if source is not None:
            node.replace_all_uses_with(source)
        else:
            first = views.setdefault((node.target, key_of(node.args), key_of([*node.kwargs.items()])), node)
            if first is not node:
                node.replace_all_uses_with(first)


def share_equal(graph: fx.Graph) -> None:
    """Replaces a call by an earlier equal call if no reader can distinguish their results."""
    known: dict[Any, fx.Node] = {}
    writes: Counter[fx.Node] = Counter()  # so far, into each memory
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        writes.update(map(memory_of, written(node)))
        if _has_effects(node):
            continue
        is_new = node.target is not ITEM and not _is_tensor_view(node)
        read = [writes[memory_of(item)] for item in node.all_input_nodes] if is_new else None
        # The text of arguments has their types.
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs), repr(read)), node)
        if first is node or (is_new and not (is_final(first) and is_final(node))):
            continue
        if not is_new or not (_is_returned(first) and _is_returned(node)):
            node.replace_all_uses_with(first)


def _is_returned(value: fx.Node) -> bool:
    """True if a call's buffer is a result's, which may be written later."""
    memory = memory_of(value)
    return any(memory_of(node) is memory for node in value.graph.output_node().all_input_nodes)


def _shown(view: Any) -> Iterator[fx.Node]:
    """Values that a view shows, from the nearest to the first."""
    while _is_tensor_view(view):
        view = view.args[0]
        yield view


def _has_effects(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    changes = [memory_of(item) for item in written(node)]
    return node.target._schema.is_mutable and not (changes and all(map(_is_never_read, changes)))


def _is_never_read(memory: fx.Node) -> bool:
    """True if a buffer is made here, and used only by calls that work in place."""
    is_created = memory.op == "call_function"
    return is_created and all(memory_of(user) is memory for user in _showing(memory))


def _showing(value: fx.Node) -> Iterator[fx.Node]:
    """Users of a value, and users of results that lie in its memory."""
    for user in value.users:
        yield user
        if memory_of(user) is memory_of(value):
            yield from _showing(user)


def _shows_numbers(value: Any) -> bool:
    """True if a value shows numbers of another one, in its dtype."""
    if not isinstance(value, fx.Node) or not _is_tensor_view(value):
        return False
    return tensor_of(value).dtype == tensor_of(value.args[0]).dtype  # type: ignore[arg-type]  # a view's tensor


def _is_tensor_view(node: fx.Node) -> bool:
    """True if a node's only result is a view of its first argument, with its elements."""
    if node.target is ITEM or is_call(node, aten._conj, aten._neg_view):
        return False
    return is_view(node) and isinstance(node.meta[VALUE], Tensor) and isinstance(node.args[0], fx.Node)
