"""Sums behind an operator that can add: the residual stream, and the outputs of shared experts.

What an operator adds is rounded once, with its result.
"""

import itertools
from collections.abc import Iterator
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
    is_read_once,
    is_unchanged,
    of_shape,
    ours,
    put,
    tensor_of,
)
from ..patterns import before_widening, match, uncast
from ..tracing import ITEM, VALUE

_EXPERTS = (ours.moe_experts, ours.moe_experts_quantized, ours.moe_weighted_reduce)
_ADDING = (*_EXPERTS, ours.linear_quantized, ours.mlp_quantized)


def add_norms(graph: fx.Graph) -> None:
    """R + rms_norm(X) -> fused_norm_add(R, X)"""
    for total in calls(graph, aten.add):
        like = tensor_of(total)
        for norm, _, residual in _terms(total, ours.rms_norm):
            x, weight, *options, factor = arguments(norm).values()
            source = in_shape(x, total, total)
            if (
                weight is None
                or tensor_of(weight).shape != like.shape[-1:]
                or source is None
                or factor != 1.0
            ):
                continue
            if all(is_unchanged(each, norm, total) for each in norm.all_input_nodes):
                new = put(total, ours.fused_norm_add.default, like, residual, source, weight, *options)
                total.replace_all_uses_with(new)
                break


def scale_norm_sums(graph: fx.Graph) -> None:
    """fused_norm_add(R, X) * SCALAR -> fused_norm_add_scalar(R, X, SCALAR)"""
    for product in calls(graph, aten.mul):
        factors: Any = itertools.permutations(product.args)
        for total, scalar in factors:
            if not is_call(total, ours.fused_norm_add) or not is_read_once(total, product):
                continue
            residual, x, weight, *options = arguments(total).values()
            if not isinstance(scalar, fx.Node) or tensor_of(scalar).shape not in ((), (1,)):
                continue
            if scalar.op != "get_attr" or tensor_of(product).dtype != tensor_of(total).dtype:
                continue
            if all(is_unchanged(each, total, product) for each in total.all_input_nodes):
                given, like = (residual, x, weight, scalar, *options), tensor_of(product)
                product.replace_all_uses_with(put(product, ours.fused_norm_add_scalar.default, like, *given))


def norm_sums(graph: fx.Graph) -> None:
    """R + FACTOR * Y, rms_norm(R + FACTOR * Y) -> fused_residual_norm(R, Y)"""
    for norm in calls(graph, ours.rms_norm):
        total, weight, eps, offset, of_norm = arguments(norm).values()
        summands = _summands(total) if is_call(total, aten.add) and of_norm == 1.0 else None
        if summands is None or weight is None or not is_unchanged(total, total, norm):
            continue
        if weight.op != "get_attr":  # it may be computed behind the sum
            continue
        like = (tensor_of(norm), tensor_of(total))
        residual, x, factor = _before_factor(*summands, total)
        given = {"eps": eps, "weight_offset": offset, "factor": factor}
        both = put(total, ours.fused_residual_norm.default, like, residual, x, weight, **given)
        for number, old in enumerate((norm, total)):
            old.replace_all_uses_with(put(total, ITEM, like[number], both, number))


def _before_factor(first: fx.Node, second: fx.Node, total: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """R, Y and FACTOR, of which a sum is R + FACTOR * Y."""
    for residual, product in ((second, first), (first, second)):
        found = match("Y * FACTOR", product) if is_read_once(product, total) else None
        if found is None or not isinstance(found["FACTOR"], (int, float)):
            continue
        value = in_shape(found["Y"], total, total)
        if value is None or tensor_of(value).dtype != tensor_of(total).dtype:
            continue
        if is_unchanged(value, product, total):
            return residual, value, float(found["FACTOR"])
    return first, second, 1.0


def add_in_operators(graph: fx.Graph) -> None:
    """R + F(X) -> F(X, residual=R); to experts, a shared expert's output may be added before."""
    for total in calls(graph, aten.add):
        for call, value, term in _terms(total, *_ADDING):
            given = arguments(call)
            if not all(is_unchanged(each, call, total) for each in call.all_input_nodes):
                continue
            term_in_shape = in_shape(term, call, total)
            if term_in_shape is None:
                continue
            new: dict[str, Any] = {"residual": term_in_shape}
            if given["residual"] is None and is_call(call, *_EXPERTS) and given["shared_out"] is None:
                shared = _shared(term_in_shape, total)
                new = shared if "shared_gate" in shared else new
            elif given["residual"] is not None:
                if not is_call(call, *_EXPERTS) or given["shared_out"] is not None:
                    continue
                new |= _shared(given["residual"], total)
            result = in_shape(changed(call, total, **new), value, total)
            assert result is not None  # the value was a view of the call's result
            total.replace_all_uses_with(result)
            break


def streams_in_update(graph: fx.Graph) -> None:
    """POST * OUT + COMB^T STREAMS -> hyper_update(STREAMS, OUT, POST, COMB), also without COMB

    POST and COMB are what `hyper_connection` gives, or that in the dtype of the streams.
    """
    for total in calls(graph, aten.add):
        terms: Any = itertools.permutations(total.args) if match("A + B", total) else ()
        for product, other in terms:
            found = match("item(C, 1) * OUT", product) if isinstance(other, fx.Node) else None
            if found and is_call(found["C"], ours.hyper_connection):
                _update(total, product, other, **found)


def _update(total: fx.Node, product: fx.Node, other: fx.Node, C: fx.Node, OUT: fx.Node) -> None:
    like, parts = tensor_of(arguments(C)["streams"]), {part.args[1]: part for part in C.users}
    *leading, count, width = like.shape
    post: Any = next((each for each in uncast(product).args if each is not OUT), OUT)
    shapes = [tensor_of(each).shape for each in (total, post, OUT)]
    if shapes != [(*leading, count, width), (*leading, count, 1), (*leading, 1, width)]:
        return
    mixed = match("bmm(transpose(item(C, 2), -1, -2), STREAMS)", other, {"C": C})
    rounded = next((user for user in total.users if is_call(user, aten._to_copy)), total)
    end = total if tensor_of(total).dtype == like.dtype else rounded
    out = of_shape(OUT, [*leading, width])
    streams = in_shape(before_widening(mixed["STREAMS"] if mixed else other), total, end)
    given = [before_widening(each) for each in (streams, out) if each is not None]
    alike = [tensor_of(each).dtype == like.dtype and is_unchanged(each, each, end) for each in given]
    if len(alike) == 2 and all(alike) and tensor_of(end).dtype == like.dtype:
        comb = parts[2] if mixed else None
        new = put(end, ours.hyper_update.default, tensor_of(end), *given, parts[1], comb)
        end.replace_all_uses_with(new)


def update_in_connections(graph: fx.Graph) -> None:
    """hyper_connection(hyper_update(S, OUT)) -> hyper_connection(S, out=OUT), which gives the streams, too"""
    for call in calls(graph, ours.hyper_connection):
        given = arguments(call)
        update = given["streams"]
        if not is_call(update, ours.hyper_update) or given["out"] is not None:
            continue
        if any(user < call for user in update.users):
            continue
        if all(is_unchanged(each, update, call) for each in update.all_input_nodes):
            values = [*call.meta[VALUE][:-1], tensor_of(update)]
            both = put(call, call.target, values, **given | arguments(update))
            update.replace_all_uses_with(put(call, ITEM, values[-1], both, len(values) - 1))
            call.replace_all_uses_with(both)


def _summands(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """R and Y of R + Y, two tensors that are like their sum."""
    first, second, alpha = arguments(total).values()
    if alpha != 1 or first is second or not all(isinstance(each, fx.Node) for each in (first, second)):
        return None
    like = tensor_of(total)
    alike = (tensor_of(e).shape == like.shape and tensor_of(e).dtype is like.dtype for e in (first, second))
    return (first, second) if all(alike) else None


def _terms(total: fx.Node, *operators: Any) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(call, its value in the shape of the sum, the other term) for each term that an operator gives.

    Experts come first: a sum of experts and an MLP is one that their operator can add.
    """
    first, second = _summands(total) or (total, total)
    found = [(beneath(v), v, t) for v, t in ((first, second), (second, first)) if is_read_once(v, total)]
    for call, value, term in sorted(found, key=lambda each: not is_call(each[0], *_EXPERTS)):
        if is_call(call, *operators):
            yield call, value, term


def _shared(term: fx.Node, reader: fx.Node) -> dict[str, object]:
    """The arguments with which experts add sigmoid(gate) * out, or any other term."""
    product = beneath(term)
    found = match("sigmoid(LOGIT) * OUT", product)
    logit, out = (before_widening(found["LOGIT"]), found["OUT"]) if found else (term, term)
    if (
        found
        and tensor_of(out).shape == tensor_of(term).shape
        and tensor_of(out).dtype == tensor_of(term).dtype
        and tensor_of(logit).shape == (*tensor_of(term).shape[:-1], 1)
        and all(is_unchanged(each, each, reader) for each in (logit, out))
    ):
        return {"shared_out": out, "shared_gate": logit, "gate_is_logit": True}
    return {"shared_out": term}
