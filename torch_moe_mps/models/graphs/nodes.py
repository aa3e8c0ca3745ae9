"""Reads and changes the calls of a recorded graph: what passes are made of.

Operators are named by their packets, torch.ops.aten.add, whichever overload was recorded.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .fakes import geometry
from .tracing import ITEM, VALUE, as_recorded, sampled

aten, ours = torch.ops.aten, torch.ops.moe_mps

# Operators that give a tensor another shape, with the same elements in the same order.
_RESHAPING = (aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach)

# Views whose schemas declare new tensors.
_UNSAFE = (aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes)


def is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def is_call(value: Any, *operators: Any) -> bool:
    return isinstance(value, fx.Node) and getattr(value.target, "overloadpacket", None) in operators


def name_of(node: fx.Node) -> str | None:
    """Name of the operator that a node calls; "item" for one of several results."""
    packet = getattr(node.target, "overloadpacket", None)
    return "item" if node.target is ITEM else getattr(packet, "__name__", None)


def calls(graph: fx.Graph, *operators: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if is_call(node, *operators)]


def arguments(call: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, in their order."""
    defaults = _signature(call.target).defaults
    return defaults | dict(zip(defaults, call.args, strict=False)) | call.kwargs


def tensor_of(node: fx.Node) -> Tensor:
    return node.meta[VALUE]


def put(before: fx.Node, operator: Any, value: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of a node, whose result is like `value`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(operator, args, kwargs)
    node.meta[VALUE] = value
    return node


def changed(call: fx.Node, before: fx.Node, /, **new: Any) -> fx.Node:
    """A copy of a call with other arguments, in front of a node."""
    return put(before, call.target, call.meta[VALUE], **arguments(call) | new)


def is_reshaped(value: Any) -> bool:
    """True if a value is a reshaped view of another one in the same dtype."""
    return is_call(value, *_RESHAPING) and value.target is not aten.view.dtype


def beneath(value: fx.Node) -> fx.Node:
    """A value before it got another shape."""
    while is_reshaped(value):
        value = value.all_input_nodes[0]
    return value


def of_shape(value: fx.Node, shape: Any) -> fx.Node | None:
    """A value as it was when it had this shape; None if it never had."""
    while [*tensor_of(value).shape] != [*shape]:
        if not is_reshaped(value):
            return None
        value = value.all_input_nodes[0]
    return value


def in_shape(value: fx.Node, like: Any, before: fx.Node) -> fx.Node | None:
    """A value in a shape, or a node's shape, in front of a node; None if that takes a copy."""
    shape = tensor_of(like).shape if isinstance(like, fx.Node) else like
    result = of_shape(value, shape)
    if result is not None:
        return result
    old = tensor_of(value)
    if isinstance(like, fx.Node) and tensor_of(like).is_contiguous() and old.is_contiguous():
        viewed = tensor_of(like).to(old.dtype)  # much faster than a view of a fake tensor
    elif can_view(old, shape):
        viewed = old.view(shape)
    else:
        return None
    return put(before, aten.view.default, viewed, value, [as_recorded(size) for size in shape])


def can_view(tensor: Tensor, shape: Any) -> bool:
    """True if a tensor has a view of this shape, whatever the numbers are that differ from call to call.

    A fake tensor gives one even where a real one cannot.
    """
    size, stride, _ = (sampled(numbers) for numbers in geometry(tensor))
    try:
        torch.empty_strided(size, stride, device="meta").view(sampled(shape))
    except RuntimeError:
        return False
    return True


def readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Readers of a value in any shape: (reader, the value in the shape that it reads)."""
    for user in value.users:
        if is_reshaped(user):
            yield from readers(user)
        else:
            yield user, value


def is_read_once(value: fx.Node, reader: fx.Node) -> bool:
    """True if nothing but one reader reads a value, in any shape."""
    while list(value.users) == [reader]:
        if beneath(value) is value:
            return True
        value, reader = value.all_input_nodes[0], value
    return False


def is_unchanged(value: fx.Node, since: fx.Node, until: fx.Node, read: bool = True) -> bool:
    """True if no call between two nodes writes the buffer of a value; unless `read`, none reads it."""
    memory, node = memory_of(value), since.next
    while node is not until:
        touched = written(node) if read or is_view(node) else node.all_input_nodes
        if any(memory_of(item) is memory for item in touched):
            return False
        node = node.next
    return True


def is_same(value: fx.Node, reader: fx.Node, before: fx.Node, read: bool = True) -> bool:
    """True if a value is unchanged between its reader and the place in front of a node."""
    if reader < before:
        return is_unchanged(value, reader, before, read)
    return is_unchanged(value, before.prev, reader, read)


def is_final(value: fx.Node) -> bool:
    """True if no call writes the buffer of a value that a call has made."""
    memory = memory_of(value)
    return memory.op != "call_function" or not _is_written(memory, memory)


def _is_written(value: fx.Node, memory: fx.Node) -> bool:
    return any(
        value in written(user) or (memory_of(user) is memory and _is_written(user, memory))
        for user in value.users
        if user.op == "call_function"
    )


def memory_of(value: fx.Node) -> fx.Node:
    """The node that made a value's buffer."""
    *_, value = value, *shown(value)
    return value.args[0] if value.target is ITEM else value  # type: ignore[return-value]  # a call


def shown(value: fx.Node) -> Iterator[fx.Node]:
    """Values that a value is a view of, from the nearest to the first."""
    while True:
        call: Any = value.args[0] if value.target is ITEM else value
        name = _signature(call.target).viewed if call.op == "call_function" else None
        if name is None:
            return
        value = arguments(call)[name]
        yield value


def hoist(value: fx.Node, before: fx.Node) -> None:
    """Moves a value in front of a node, with the views that it is computed from."""
    if before < value:
        for node in value.all_input_nodes:
            hoist(node, before)
        before.prepend(value)


def is_view(node: fx.Node) -> bool:
    """True if a node is a view of another one."""
    if node.target is ITEM:
        return True
    return node.op == "call_function" and not written(node) and _signature(node.target).viewed is not None


class _Signature(NamedTuple):
    """Schema of an operator: defaults, written arguments, and the argument whose view it returns."""

    defaults: dict[str, Any]
    written: tuple[str, ...]
    viewed: str | None


@functools.cache
def _signature(operator: Any) -> _Signature:
    """Defaults of an operator's arguments, those it writes into, and the one whose view it returns."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return _Signature({}, (), None)
    aliased = {
        argument.name: argument.alias_info for argument in schema.arguments if argument.alias_info is not None
    }
    returns_view = bool(schema.returns) and schema.returns[0].alias_info is not None
    viewed = next(iter(aliased), None) if returns_view else None
    return _Signature(
        {argument.name: argument.default_value for argument in schema.arguments},
        tuple(name for name, alias in aliased.items() if alias.is_write),
        "self" if operator.overloadpacket in _UNSAFE else viewed,
    )


def written(call: fx.Node) -> list[fx.Node]:
    """The tensors that a call writes into."""
    names = _signature(call.target).written if call.op == "call_function" else ()
    passed = arguments(call) if names else {}
    values = (value for name in names for value in as_list(passed[name]))
    return [value for value in values if isinstance(value, fx.Node)]


def as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]
