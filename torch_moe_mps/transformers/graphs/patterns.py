"""Formulas of operators as text, found in a recorded graph.

    match("rms_norm(A + B, W, EPS, OFFSET)", node)

An upper-case name stands for any argument, twice for the same one; other names are operators, of aten or of
this package, whose results no call writes into, and what a formula does not say of their arguments is as by
default. `linear(X, W)` is a matmul however it was recorded, `item(R, 0)` one of several results. Sums and
products match in either order, and dimensions count from the last: -1. Casts and other shapes are looked
through in front of an operator.
"""

import ast
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .nodes import arguments, aten, beneath, is_call, is_final, tensor_of
from .tracing import ITEM

_SIGNS = {ast.Add: "add", ast.Mult: "mul", ast.Div: "div", ast.Sub: "sub"}
Bound = dict[str, Any]


def match(formula: str, value: Any, bound: Bound | None = None) -> Bound | None:
    """{name: argument} if a node computes a formula, else None. `bound`: what names stand for already."""
    found = _match(_parsed(formula), value, bound or {})
    leaves = [] if found is None else [each for each in found.values() if each is not value]
    return found if found and all(map(is_final, _computed(value, leaves))) else None


def _computed(value: Any, of: list[Any]) -> Iterator[fx.Node]:
    """A value and all that it is computed of, up to other values."""
    if isinstance(value, fx.Node) and not any(value is each for each in of):
        yield value
        for each in value.all_input_nodes:
            yield from _computed(each, of)


def _match(form: ast.expr, value: Any, bound: Bound) -> Bound | None:
    if isinstance(form, ast.Name):
        return bound | {form.id: value} if _is_same(bound.get(form.id, value), value) else None
    if isinstance(form, ast.List):
        is_list = isinstance(value, (list, tuple)) and len(value) == len(form.elts)
        return _match_all(form.elts, value, bound) if is_list else None
    if isinstance(form, (ast.Constant, ast.UnaryOp)):
        return bound if not isinstance(value, fx.Node) and value == ast.literal_eval(form) else None
    if isinstance(form, ast.BinOp):
        name, forms = _SIGNS[type(form.op)], [form.left, form.right]
    else:
        assert isinstance(form, ast.Call) and isinstance(form.func, ast.Name)
        name, forms = form.func.id, form.args
    given = _arguments(name, uncast(value))
    if given is None:
        return None
    given, rest = given[: len(forms)], given[len(forms) :]
    if len(given) < len(forms) or any(value != default for value, default in rest):
        return None
    values = [value for value, _ in given]
    found = _match_all(forms, values, bound)
    return _match_all(forms, values[::-1], bound) if found is None and name in ("add", "mul") else found


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, fx.Node) and type(a) is type(b) and a == b)


def _match_all(forms: list[ast.expr], values: list[Any], bound: Bound | None) -> Bound | None:
    for form, value in zip(forms, values, strict=True):
        bound = None if bound is None else _match(form, value, bound)
    return bound


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
    *biases, x, turned = (value for value in arguments(call).values() if isinstance(value, fx.Node))
    is_scaled = any(arguments(call).get(name, 1) != 1 for name in ("alpha", "beta"))
    if is_scaled or not is_call(turned, aten.t) or any(tensor_of(each).dim() != 1 for each in biases):
        return None
    return x, turned.args[0], biases[0] if biases else None


def _arguments(name: str, call: Any) -> list[tuple[Any, Any]] | None:
    """The arguments of a call of this name, each with its default; None for another call."""
    if not isinstance(call, fx.Node):
        return None
    if name == "item":
        return [(value, None) for value in call.args] if call.target is ITEM else None
    if name == "linear":
        linear = linear_of(call)
        return None if linear is None else [(value, None) for value in linear]
    schema = getattr(call.target, "_schema", None)
    if schema is None or schema.name.partition("::")[2] != name:
        return None
    given = arguments(call)
    if "dim" in given and isinstance(call.args[0], fx.Node):
        given["dim"] = _from_the_last(given["dim"], tensor_of(call.args[0]).dim())
    return [(given[each.name], each.default_value) for each in schema.arguments]


def _from_the_last(dim: Any, rank: int) -> Any:
    """A dimension, or several, as negative numbers."""
    if isinstance(dim, (list, tuple)):
        return [_from_the_last(each, rank) for each in dim]
    return dim - rank if isinstance(dim, int) and dim >= 0 else dim


@functools.cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body
