"""Formulas of operators as text, found in a recorded graph.

    match("rms_norm(A + B, W, EPS, OFFSET)", node)

An upper-case name stands for any argument, twice for the same one; other names are operators, of aten or of
this package, whose results no call writes into, and what a formula does not say of their arguments is as by
default. `linear(X, W)` is a matmul however it was recorded, `item(R, 0)` one of several results. Sums and
products match in either order, and dimensions count from the last: -1. Casts and other shapes are looked
through in front of an operator.

    X[..., N, H]            a tensor as read, whose last dimensions are N and H, the others `...`
    X[S]                    one of the shape S
    rms_norm(X, W, *A[S])   *A: all other arguments of the call; S: the shape of its result
    rms_norm((T := A + B))  T: what the sum gives, which others may read, too
"""

import ast
import functools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .nodes import arguments, aten, beneath, is_call, is_final, tensor_of
from .tracing import ITEM, VALUE

_SIGNS = {ast.Add: "add", ast.Mult: "mul", ast.Div: "div", ast.Sub: "sub"}
Bound = dict[str, Any]
_REQUIRED = object()  # in place of the default of an argument that has none


class Rest(NamedTuple):
    """The arguments of a call that a formula does not name, without defaults."""

    call: fx.Node
    arguments: dict[str, Any]


class Shared(NamedTuple):
    """A value inside of a formula that others may read."""

    node: fx.Node


def match(formula: str, value: Any, bound: Bound | None = None) -> Bound | None:
    """{name: argument} if a node computes a formula, else None. `bound`: what names stand for already."""
    return next(matches(formula, value, bound), None)


def matches(formula: str, value: Any, bound: Bound | None = None) -> Iterator[Bound]:
    """All matches of a formula at a node."""
    for result in _match(parsed(formula), value, bound or {}):
        if all(map(is_final, computed(value, leaves(result)))):
            yield result


def leaves(bound: Bound) -> set[fx.Node]:
    """The values that names of a formula stand for."""
    rests = [value for item in bound.values() if isinstance(item, Rest) for value in item.arguments.values()]
    return {value for value in (*bound.values(), *rests) if isinstance(value, fx.Node)}


def computed(value: Any, of: Collection[fx.Node]) -> dict[fx.Node, None]:
    """A value and all that it is computed of, up to other values: the last first."""
    result: dict[fx.Node, None] = {}
    waiting = [value] if isinstance(value, fx.Node) else []
    while waiting:
        node = waiting.pop()
        if node not in result and (node is value or node not in of):
            result[node] = None
            waiting += node.all_input_nodes
    return result


def _match(form: ast.expr, value: Any, bound: Bound) -> Iterator[Bound]:
    """Every binding of names with which a form describes a value."""
    if isinstance(form, ast.Name):
        yield from _named(form.id, value, bound)
    elif isinstance(form, ast.NamedExpr):
        for result in _match(form.value, value, bound):
            yield result | {form.target.id: Shared(uncast(value))}
    elif isinstance(form, ast.Subscript):
        tensor = value.call if isinstance(value, Rest) else value
        if isinstance(tensor, fx.Node) and isinstance(tensor.meta.get(VALUE), Tensor):
            for result in _match(form.value, value, bound):
                yield from _of_shape(form.slice, tensor_of(tensor).shape, result)
    elif isinstance(form, ast.List):
        if isinstance(value, (list, tuple)) and len(value) == len(form.elts):
            yield from _match_all([*zip(form.elts, value, strict=True)], bound)
    elif isinstance(form, (ast.Constant, ast.UnaryOp)):
        if not isinstance(value, fx.Node) and value == ast.literal_eval(form):
            yield bound
    else:
        yield from _match_call(form, value, bound)


def _match_call(form: ast.expr, value: Any, bound: Bound) -> Iterator[Bound]:
    name = called(form)
    call = value if name == "_to_copy" else uncast(value)
    arguments = _arguments(name, call)
    pairs = None if arguments is None else _pairs(form, call, arguments)
    if pairs is None:
        return
    yield from _match_all(pairs, bound)
    if name in ("add", "mul"):
        (one, x), (other, y) = pairs
        yield from _match_all([(one, y), (other, x)], bound)


def _pairs(
    form: ast.expr, call: fx.Node, arguments: dict[str, tuple[Any, Any]]
) -> list[tuple[ast.expr, Any]] | None:
    """Pairs of a formula's and a call's arguments; None if one is missing, or others are set."""
    if isinstance(form, ast.BinOp):
        forms, keywords = [form.left, form.right], list[ast.keyword]()
    else:
        assert isinstance(form, ast.Call)
        forms, keywords = form.args, form.keywords
    positional = [item for item in forms if not isinstance(item, ast.Starred)]
    named = dict(zip(arguments, positional, strict=False)) | {item.arg: item.value for item in keywords}
    if len(named) < len(positional) + len(keywords) or any(item not in arguments for item in named):
        return None
    rest = {item: value for item, value in arguments.items() if item not in named}
    pairs = [(item, arguments[argument][0]) for argument, item in named.items()]  # type: ignore[index]
    for star in forms[len(positional) :]:
        others = {item: value for item, (value, default) in rest.items() if value != default}
        pairs.append((star.value, Rest(call, others)))  # type: ignore[attr-defined]
        rest = {}
    return None if any(value != default for value, default in rest.values()) else pairs


def _named(name: str, value: Any, bound: Bound) -> Iterator[Bound]:
    if _is_same(bound.get(name, value), value):
        yield bound | {name: value}


def _of_shape(form: ast.expr, shape: Any, bound: Bound) -> Iterator[Bound]:
    if not isinstance(form, ast.Tuple):
        assert isinstance(form, ast.Name)
        yield from _named(form.id, (*shape,), bound)
        return
    sizes, elements = [*shape], [*form.elts]
    if ast.unparse(elements[0]) == "...":
        count = len(sizes) - len(elements) + 1
        sizes = [(*sizes[:count],), *sizes[count:]] if count >= 0 else []
        elements[0] = ast.Name("...")
    if len(sizes) == len(elements):
        yield from _match_all([*zip(elements, sizes, strict=True)], bound)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, fx.Node) and type(a) is type(b) and a == b)


def _match_all(pairs: list[tuple[ast.expr, Any]], bound: Bound) -> Iterator[Bound]:
    if not pairs:
        yield bound
        return
    for result in _match(*pairs[0], bound):
        yield from _match_all(pairs[1:], result)


def uncast(value: Any) -> Any:
    """A value before casts and other shapes."""
    while isinstance(value, fx.Node) and (is_call(value, aten._to_copy) or beneath(value) is not value):
        value = value.all_input_nodes[0]
    return value


def before_widening(value: Any) -> Any:
    """A value before casts that keep all its digits."""
    while is_call(value, aten._to_copy) and is_final(value):
        source: Any = value.args[0]
        if torch.promote_types(tensor_of(source).dtype, tensor_of(value).dtype) != tensor_of(value).dtype:
            break
        value = source
    return value


def linear_of(call: Any) -> tuple[Any, Any, Any] | None:
    """x, weight and bias of a call that is a linear layer, else None."""
    if is_call(call, aten.linear):
        x, weight, bias = arguments(call).values()
        return x, weight, bias
    if not is_call(call, aten.mm, aten.addmm):
        return None
    *biases, x, transposed = (value for value in arguments(call).values() if isinstance(value, fx.Node))
    is_scaled = any(arguments(call).get(name, 1) != 1 for name in ("alpha", "beta"))
    if is_scaled or not is_call(transposed, aten.t) or any(tensor_of(item).dim() != 1 for item in biases):
        return None
    return x, transposed.args[0], biases[0] if biases else None


def called(form: ast.expr) -> str:
    """The name of the operator that a formula calls last."""
    if isinstance(form, ast.BinOp):
        return _SIGNS[type(form.op)]
    assert isinstance(form, ast.Call) and isinstance(form.func, ast.Name)
    return form.func.id


def _arguments(name: str, call: Any) -> dict[str, tuple[Any, Any]] | None:
    """The arguments of a call of this name, each with its default; None for another call."""
    if not isinstance(call, fx.Node):
        return None
    if name == "item":
        return {str(n): (value, None) for n, value in enumerate(call.args)} if call.target is ITEM else None
    if name == "linear":
        linear = linear_of(call)
        return None if linear is None else {str(n): (value, None) for n, value in enumerate(linear)}
    schema = getattr(call.target, "_schema", None)
    if schema is None or schema.name.partition("::")[2] != name:
        return None
    passed = arguments(call)
    if "dim" in passed and isinstance(call.args[0], fx.Node):
        passed["dim"] = _from_the_last(passed["dim"], tensor_of(call.args[0]).dim())
    return {
        argument.name: (
            passed[argument.name],
            argument.default_value if argument.has_default_value() else _REQUIRED,
        )
        for argument in schema.arguments
    }


def _from_the_last(dim: Any, rank: int) -> Any:
    """A dimension, or several, as negative numbers."""
    if isinstance(dim, (list, tuple)):
        return [_from_the_last(item, rank) for item in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


@functools.cache
def parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body
