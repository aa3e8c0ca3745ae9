"""Attention: the gate behind it, and the rotation in front."""

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
    memory_of,
    ours,
    put,
    tensor_of,
)
from ..patterns import before_widening, match
from ..tracing import VALUE, as_recorded, geometry

# The arguments of attention that rope_attention_ has, too, and what the others must be.
_OF_BOTH = ("q", "k", "v", "scale", "window", "key_range", "softcap", "sinks", "gate", "gate_activation")
_PLAIN = {
    **dict.fromkeys(("mask", "k_scales", "k_biases", "v_scales", "v_biases", "indices", "k_tail", "v_tail")),
    **{"index_block": 1, "lookahead": 0, "tail_rate": 1, "position": 0, "relative": None, "dtype": None},
}
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


def turn_in_attention(graph: fx.Graph) -> None:
    """attention(rope_cache_(Q, K, V), KEYS, VALUES) of one token -> rope_attention_(Q, K, V, KEYS, VALUES)"""
    for call in calls(graph, ours.attention):
        given, turning = arguments(call), arguments(call)["q"]
        if not is_call(turning, ours.rope_cache_) or [*turning.users] != [call]:
            continue
        others = {name: value for name, value in given.items() if name not in _OF_BOTH}
        if tensor_of(turning).shape[2] != 1 or others != _PLAIN:
            continue
        rotation = arguments(turning)
        places, caches = (
            ((rotation["keys_"], given["k"]), (rotation["values_"], given["v"])),
            ("keys_", "values_"),
        )
        if not all(_ends_with(cache, place) for place, cache in places):
            continue
        if not all(is_unchanged(place, turning, call, read=False) for place, _ in places):
            continue
        if not all(is_unchanged(each, turning, call) for each in turning.all_input_nodes):
            continue
        held = dict(zip(caches, (given["k"], given["v"]), strict=True))
        options = {name: given[name] for name in _OF_BOTH if name not in "qkv"}
        like = call.meta[VALUE]
        call.replace_all_uses_with(put(call, ours.rope_attention_.default, like, **rotation | held | options))
        graph.erase_node(call)
        graph.erase_node(turning)


def _ends_with(cache: fx.Node, place: fx.Node) -> bool:
    """Whether the last token of a cache [B, H, S, D] is that of a place in the same memory."""
    if memory_of(cache) is not memory_of(place):
        return False
    (shape, stride, offset), (other_shape, other_stride, other_offset) = (
        geometry(tensor_of(each)) for each in (cache, place)
    )
    ends = offset + shape[2] * stride[2], other_offset + other_shape[2] * other_stride[2]
    pairs = zip((*stride, ends[0]), (*other_stride, ends[1]), strict=True)
    alike = [*shape[:2], shape[3]] == [*other_shape[:2], other_shape[3]]
    return alike and all(str(as_recorded(one)) == str(as_recorded(other)) for one, other in pairs)


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
