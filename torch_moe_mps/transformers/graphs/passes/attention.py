"""Attention: the gate behind it."""

from typing import Any

from torch import fx

from ..nodes import (
    arguments,
    aten,
    beneath,
    calls,
    changed,
    in_shape,
    is_call,
    is_final,
    is_read_once,
    is_unchanged,
    ours,
    tensor_of,
)
from ..patterns import before_widening, match

_HEADS = (ours.heads_mm, ours.heads_quantized)


def gate_in_attention(graph: fx.Graph) -> None:
    """sigmoid(GATE) * attention(...) -> attention(..., gate=GATE); softplus, too.

    One number for a head may be a factor of what the head's matrix makes of latents: a product is linear.
    """
    for product in calls(graph, aten.mul):
        for activation in ("sigmoid", "softplus"):
            found = match(f"{activation}(GATE) * X", product)
            if found is not None:
                _gate(product, activation, **found)
                break


def _gate(product: fx.Node, activation: str, GATE: Any, X: Any) -> None:
    if not isinstance(X, fx.Node) or not is_read_once(X, product):
        return
    outer = beneath(X)
    taken_back = is_call(outer, *_HEADS)
    inner = arguments(outer)["x"] if taken_back else X
    call = beneath(inner)
    if not is_call(call, ours.attention) or arguments(call)["gate"] is not None:
        return
    if taken_back and (arguments(outer)["transposed"] or not is_read_once(inner, outer)):
        return
    factor: Any = next(each for each in product.args if each is not X)
    if tensor_of(product).dtype != tensor_of(X).dtype or tensor_of(product).shape != tensor_of(X).shape:
        return
    if tensor_of(factor).shape == tensor_of(X).shape and not taken_back:
        like = call
    elif (
        tensor_of(factor).shape == (*tensor_of(X).shape[:-1], 1)
        and tensor_of(X).shape == tensor_of(outer).shape
    ):
        like = factor
    else:
        return
    source = _uncopied(before_widening(GATE), like, product)
    if source is None or tensor_of(source).dtype != tensor_of(arguments(call)["q"]).dtype:
        return
    others = {*call.all_input_nodes, *(outer.all_input_nodes if taken_back else ())} - {inner}
    later = [(each, call) for each in others] + [(source, source)]
    if not all(is_unchanged(each, since, product) for each, since in later):
        return
    new = changed(call, product, gate=source, gate_activation=activation)
    if taken_back:
        inside = in_shape(new, inner, product)
        assert inside is not None  # what it takes the place of was a view
        new = changed(outer, product, x=inside)
    result = in_shape(new, X, product)
    assert result is not None  # likewise
    product.replace_all_uses_with(result)


def _uncopied(value: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node | None:
    """A value in the shape of another one, before copies that only made it contiguous."""
    shape, found = tensor_of(like).shape, value
    while tensor_of(found).shape != shape or is_call(found, aten.clone):
        is_copy = is_call(found, aten.clone) and is_final(found)
        source: Any = found.args[0] if is_copy else beneath(found)
        if source is found:
            return in_shape(value, like, before)
        found = source
    return found
