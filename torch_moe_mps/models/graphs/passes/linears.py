"""Linear layers with one input (q, k and v; gate and up; a router and a gate) as one operator.

`basics/joined.py` lays their rows one behind the other, and the layers' parameters become views of them: the
operator reads later writes into them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ....ops._formats import ARGUMENTS
from ...basics.tensors import joined_rows, may_join
from ..nodes import (
    arguments,
    aten,
    beneath,
    calls,
    can_view,
    changed,
    in_shape,
    is_call,
    is_final,
    is_read_once,
    is_unchanged,
    ours,
    put,
    tensor_of,
)
from ..patterns import linear_of, match
from ..tracing import ITEM, PARTS, TENSOR, VALUE, Number, as_given, as_recorded, is_operator, key_of
from .norms import MOST_ROWS

_COPIES = (aten.clone, aten.cat)
_SOME_ROWS = 2  # enough to show what happens to each row


def join_linears(graph: fx.Graph) -> None:
    """linear_quantized(X, A), linear_quantized(X, B) -> the parts of linear_quantized(X, [A, B]); so mm"""
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for call in calls(graph, ours.linear_quantized, aten.mm):
        kind = _of_quantised(call) if is_call(call, ours.linear_quantized) else _of_dense(call)
        if kind is not None:
            groups[kind].append(call)
    for (x, *_), group in groups.items():
        if all(is_unchanged(x, group[0], call) for call in group[1:]):
            for run in _runs(group):
                _join(run)


def _of_quantised(call: fx.Node) -> tuple[Any, ...] | None:
    """(input, format, dtypes ...) that quantised layers share if they can be joined; None for other calls."""
    passed = arguments(call)
    x, *weights, format = (passed.pop(name) for name in ("x", *ARGUMENTS, "bias", "format"))
    has_options = any(isinstance(value, fx.Node) for value in passed.values())
    if has_options or not all(item is None or _is_parameter(item) for item in weights):
        return None
    return x, format, passed["dtype"], *map(_kind, weights[:3])


def _of_dense(call: fx.Node) -> tuple[Any, ...] | None:
    """(input, kind of weight) that small dense layers share for one token; None for other calls.

    Parts of several tokens are copied, which takes as many dispatches; large matrices are not moved.
    """
    x, weight, _ = linear_of(call) or (None, None, None)
    tokens, rows = tensor_of(call).shape
    if x is None or not _is_parameter(weight) or tokens != 1 or rows > MOST_ROWS:
        return None
    return x, *_kind(weight)


def order_outputs(graph: fx.Graph) -> None:
    """Copies that only bring each token's outputs into another order -> linear_quantized(..., order=...)"""
    for call in calls(graph, ours.linear_quantized):
        passed, shape = arguments(call), tensor_of(call).shape
        if passed["residual"] is not None or passed["order"] is not None:
            continue
        if len(shape) < 2 or any(size != 1 for size in shape[1:-1]):
            continue
        rows = shape[0] if type(shape[0]) is int else _SOME_ROWS
        moved, ends = _moved(call, torch.arange(rows * shape[-1]).view(rows, *shape[1:]))
        copies = [node for node in moved if is_call(node, *_COPIES)]
        if copies and all(map(is_final, [*copies, *ends])):
            parts = [moved[end] for end in ends]
            sources = _sources_of_each(rows, shape[-1], parts)
            if sources is not None:
                _order(call, ends, sources, [part.numel() // rows for part in parts])


def _sources_of_each(rows: int, width: int, parts: list[Tensor]) -> Tensor | None:
    """The order that parts, numbered outputs of so many rows, give each row's; None if they give another set,
    or not each row the same.
    """
    if any(part.numel() % rows for part in parts):
        return None
    first, *others = torch.cat([part.reshape(rows, -1) for part in parts], 1)
    is_order = torch.equal(first.sort().values, torch.arange(width))
    is_of_each = all(torch.equal(item, first + n * width) for n, item in enumerate(others, 1))
    return first if is_order and is_of_each else None


def factor_in_linears(graph: fx.Graph) -> None:
    """The parts of linear_quantized(X), each times N -> the parts of linear_quantized(X, factor=N)"""
    for call in calls(graph, ours.linear_quantized):
        passed, reads = arguments(call), [*_readers_of_parts(call)]
        is_plain = passed["activation"] is passed["residual"] is passed["order"] is None
        if not is_plain or not reads or not all(is_call(product, aten.mul) for product, _ in reads):
            continue
        products, parts = zip(*reads, strict=True)
        factor = _common_factor(reads)
        if factor is None or not all(map(is_final, (call, *products))):
            continue
        if set_values(products, [*map(tensor_of, parts)]):
            for product, part in reads:
                product.replace_all_uses_with(part)
            call.replace_all_uses_with(changed(call, call, factor=passed["factor"] * factor))


def _common_factor(products: Sequence[tuple[fx.Node, fx.Node]]) -> float | None:
    """The finite number that each product multiplies its part by, in the part's dtype; None without one."""
    if any(tensor_of(product).dtype != tensor_of(part).dtype for product, part in products):
        return None
    factors = {
        arguments(product)["other"] if arguments(product)["self"] is part else None
        for product, part in products
    }
    factor = factors.pop()
    return factor if not factors and isinstance(factor, (int, float)) and math.isfinite(factor) else None


def _readers_of_parts(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Readers of a value, of its parts and of other views: (reader, the value that it reads)."""
    for user in value.users:
        if user.target is ITEM or (_moves(user) and not is_call(user, *_COPIES)):
            yield from _readers_of_parts(user)
        else:
            yield user, value


def activate_in_linears(graph: fx.Graph) -> None:
    """silu(linear_quantized(X) / N) -> linear_quantized(X, activation="silu"), also of its first outputs

    GELU in the same way.
    """
    for active in calls(graph, aten.silu, aten.gelu):
        value, divisor = _quotient(active.args[0], active)
        call = _linear_behind(beneath(value))
        if call is None or not isinstance(divisor, (int, float)) or divisor == 0:
            continue
        passed, like = arguments(call), tensor_of(active)
        alike = like.dtype == tensor_of(call).dtype and is_final(active) and is_final(call)
        if not alike or passed["residual"] is not None or passed["activation"] is not None:
            continue
        first = in_shape(value, active, active)
        if first is None or not set_values([active], [tensor_of(first)]):
            continue
        options = {"activated": tensor_of(beneath(value)).shape[-1], "factor": 1 / divisor}
        active.replace_all_uses_with(first)
        call.replace_all_uses_with(changed(call, call, activation=_name_of(active), **options))


def _name_of(active: fx.Node) -> str:
    if is_call(active, aten.silu):
        return "silu"
    return {"none": "gelu", "tanh": "gelu_tanh"}[arguments(active)["approximate"]]


def _quotient(value: Any, reader: fx.Node) -> tuple[Any, Any]:
    """Y and N of Y / N that only the reader reads; N is 1 without a quotient, None where others read it."""
    quotient = beneath(value)
    bound = match("Y / N", quotient) if is_call(quotient, aten.div) else None
    if bound is not None and is_read_once(value, reader):
        value, divisor, reader = bound["Y"], bound["N"], quotient
    else:
        divisor = 1
    return value, divisor if is_read_once(value, reader) else None


def _linear_behind(value: fx.Node) -> fx.Node | None:
    """The linear layer that gives a value, or whose first outputs it is."""
    call: Any = value
    if value.target is ITEM and value.args[1] == 0 and is_call(value.args[0], aten.split_with_sizes):
        source, _, dim = arguments(value.args[0]).values()  # type: ignore[arg-type]  # a call
        call = source if dim in (-1, tensor_of(source).dim() - 1) else None
    return call if is_call(call, ours.linear_quantized) else None


def _moved(call: fx.Node, values: Tensor) -> tuple[dict[fx.Node, Any], list[fx.Node]]:
    """(values of the nodes that only move a call's result, the nodes among them that other calls read).

    A symbol for the rows of the call counts as the number of rows in `values`.
    """
    rows = key_of(tensor_of(call).shape[0])

    def as_moved(value: Any) -> Any:
        if isinstance(value, Number):
            return len(values) if key_of(value) == rows else value
        return moved[value] if isinstance(value, fx.Node) else value

    moved: dict[fx.Node, Any] = {call: values}
    ends: dict[fx.Node, None] = {}
    node, waiting = call, set(call.users)
    while waiting:
        node = node.next
        if node not in waiting:
            continue
        waiting.remove(node)
        inside = [item for item in node.all_input_nodes if item in moved]
        if inside and inside == node.all_input_nodes and (node.target is ITEM or _moves(node)):
            target: Any = node.target
            args: Any = fx.node.map_aggregate(node.args, as_moved)
            if _has_numbers((args, node.kwargs)):
                ends.update(dict.fromkeys(inside))
                continue
            moved[node] = target(*args, **node.kwargs)
            waiting.update(node.users)
        else:
            ends.update(dict.fromkeys(inside))
    return moved, list(ends)


def _has_numbers(arguments: Any) -> bool:
    return any(isinstance(leaf, Number) for leaf in tree_leaves(arguments))


def _order(call: fx.Node, ends: list[fx.Node], sources: Tensor, sizes: list[int]) -> None:
    """Lets a call give the values of all ends, one behind the other; `sizes` of each row."""
    weight, parts = tensor_of(arguments(call)["packed"]), tensor_of(call).split_with_sizes(sizes, -1)
    order = constant_of(call, sources.argsort().int().to(weight.device), [])
    both = [(part, tensor_of(end).shape) for end, part in zip(ends, parts, strict=True)]
    if not all(can_view(*one) for one in both) or not set_values(ends, [part.view(of) for part, of in both]):
        return
    ordered = changed(call, call, order=order)
    split = put(call, aten.split_with_sizes.default, parts, ordered, sizes, -1)
    for number, end in enumerate(ends):
        item, like = put(call, ITEM, parts[number], split, number), tensor_of(end)
        shape = [as_recorded(size) for size in like.shape]
        end.replace_all_uses_with(put(call, aten.view.default, like, item, shape))


def _moves(node: fx.Node) -> bool:
    target: Any = node.target
    return is_call(node, *_COPIES, aten._unsafe_view) or (is_operator(node) and target.is_view)


def _runs(group: list[fx.Node]) -> list[list[fx.Node]]:
    """A group in parts whose weights may lie in one memory: another program may have joined some of them."""
    runs: list[list[fx.Node]] = []
    for call in group:
        joined = [*runs[-1], call] if runs else []
        rows = [tensor_of(each).shape[-1] for each in joined]
        if runs and all(may_join(parts, rows) for parts in _weights_of(joined).values()):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs


def _weights_of(group: list[fx.Node]) -> dict[str, list[Tensor | None]]:
    if is_call(group[0], aten.mm):
        return {"mat2": [_tensor(call.args[1].args[0]) for call in group]}  # type: ignore[union-attr,arg-type]
    return {name: [_tensor(arguments(call)[name]) for call in group] for name in (*ARGUMENTS, "bias")}


def _join(group: list[fx.Node]) -> None:
    """Replaces linear layers with one input by one whose rows are theirs, and a split of its result."""
    first, rows, weights = group[0], [tensor_of(call).shape[-1] for call in group], _weights_of(group)
    if len(group) < 2:
        return
    result = tensor_of(first).new_empty((*tensor_of(first).shape[:-1], sum(rows)))
    parts = result.split_with_sizes(rows, -1)
    if not set_values(group, parts):
        return
    matrix = {name: constant_of(first, joined_rows(item, rows), item) for name, item in weights.items()}
    if is_call(first, aten.mm):
        rows_of_all: Any = matrix["mat2"]
        matrix["mat2"] = put(first, aten.t.default, tensor_of(rows_of_all).t(), rows_of_all)
    joined = put(first, first.target, result, **arguments(first) | matrix)
    split = put(first, aten.split_with_sizes.default, parts, joined, rows, -1)
    for number, call in enumerate(group):
        call.replace_all_uses_with(put(first, ITEM, parts[number], split, number))


def _is_parameter(value: Any) -> bool:
    tensor = value.meta.get(TENSOR)
    is_weight = type(tensor) is nn.Parameter or (type(tensor) is Tensor and not tensor.is_floating_point())
    return is_weight and tensor.is_contiguous() and not tensor.is_inference()


def _tensor(weight: fx.Node | None) -> Tensor | None:
    return None if weight is None else weight.meta[TENSOR]


def _kind(weight: fx.Node | None) -> Any:
    """Dtype, device and shape of a row, which weights that are joined have in common; None without one."""
    tensor = _tensor(weight)
    return None if tensor is None else (tensor.dtype, tensor.device, tensor.shape[1:])


def constant_of(before: fx.Node, tensor: Tensor | None, parts: list[Tensor | None]) -> fx.Node | None:
    if tensor is None:
        return None
    with before.graph.inserting_before(before):
        node = before.graph.get_attr("joined")
    node.meta.update({TENSOR: tensor, VALUE: tensor, PARTS: [part for part in parts if part is not None]})
    return node


def set_values(nodes: Sequence[fx.Node], values: Sequence[Tensor]) -> bool:
    """Sets node values and re-derives their views. Returns: False if a reader rejects the layout."""
    shown: dict[fx.Node, Any] = {}
    if not all(_can_take(*item, shown) for item in zip(nodes, values, strict=True)):
        return False
    for node, value in shown.items():
        node.meta[VALUE] = value
    return True


def _can_take(node: fx.Node, value: Any, shown: dict[fx.Node, Any]) -> bool:
    """True if every reader of a node takes another value in its place; adds its views to `shown`.

    aten's operators give the strides of what they read, so views of their results may fail, too.
    """
    shown[node] = value
    for user in node.users:
        target: Any = user.target
        is_view = target is ITEM or (_moves(user) and not is_call(user, *_COPIES))
        if not is_view and (not is_operator(user) or target.namespace != "aten" or target._schema.is_mutable):
            continue
        args: Any = fx.node.map_aggregate(user.args, lambda item: _as_taken(item, shown))
        if is_call(user, aten.view, aten._unsafe_view) and not can_view(*args):
            return False
        result = target(*args, **user.kwargs)
        if (is_view or _layout(result) != _layout(user.meta[VALUE])) and not _can_take(user, result, shown):
            return False
    return True


def _as_taken(value: Any, shown: dict[fx.Node, Any]) -> Any:
    """An argument of a node, as its operator takes it."""
    return shown.get(value, value.meta[VALUE]) if isinstance(value, fx.Node) else as_given(value)


def _layout(value: Any) -> Any:
    return value.stride() if isinstance(value, Tensor) else [*map(Tensor.stride, value)]
