"""Low-rank hyper-connections: a residual of streams, which a block reads as a mean and writes by gates."""

from typing import Any

from torch import fx

from ....ops.hyper_connection import MAX_STREAMS
from ...graphs.nodes import (
    arguments,
    aten,
    beneath,
    calls,
    hoist,
    in_shape,
    is_call,
    is_unchanged,
    memory_of,
    of_shape,
    ours,
    put,
    tensor_of,
)
from ...graphs.patterns import match
from ...graphs.tracing import ITEM


def streams_in_linears(graph: fx.Graph) -> None:
    """mean(sigmoid(linear_quantized(X)) * STREAMS, -2) -> linear_quantized(X, streams=STREAMS): of a token"""
    for mean in calls(graph, aten.mean):
        found = match("mean(sigmoid(Y) * STREAMS, [-2])", mean)
        if found is None or not is_call(beneath(found["Y"]), ours.linear_quantized):
            continue
        call, product = beneath(found["Y"]), tensor_of(mean.args[0])  # type: ignore[arg-type]  # a call
        given = arguments(call)
        if any(given[name] is not None for name in ("residual", "order", "activation", "streams")):
            continue
        (*_, count, width), dtype = product.shape, tensor_of(mean).dtype
        streams = of_shape(found["STREAMS"], [*tensor_of(call).shape[:-1], count, width])
        if streams is None or count > MAX_STREAMS or tensor_of(call).numel() != count * width:
            continue
        if any(tensor_of(each).dtype != dtype for each in (call, streams)):
            continue
        if all(is_unchanged(each, each, mean) for each in (*call.all_input_nodes, streams)):
            value = tensor_of(streams).select(-2, 0)
            new = put(mean, call.target, value, **given | {"streams": streams})
            result = in_shape(new, mean, mean)
            assert result is not None  # it is contiguous
            mean.replace_all_uses_with(result)


def gated_norm_sums(graph: fx.Graph) -> None:
    """R + Y * (FACTOR * sigmoid(GATE / N)), rms_norm of it -> fused_residual_norm(R, Y, gate=GATE)"""
    for norm in calls(graph, ours.rms_norm):
        x, weight, eps, offset, of_norm = arguments(norm).values()
        total, like = beneath(x), tensor_of(norm)
        found = match("R + Y * (FACTOR * sigmoid(GATE / N))", total) if is_call(total, aten.add) else None
        if found is None or weight is None or of_norm != 1.0 or memory_of(weight).op != "get_attr":
            continue
        streams = _streams(total, x, **found) if is_unchanged(total, total, norm) else None
        if streams is None:
            continue
        hoist(weight, total)
        options = {"weight": weight, "eps": eps, "weight_offset": offset}
        options |= {"factor": float(found["FACTOR"]), "gate_factor": 1 / found["N"]}
        both = put(total, ours.fused_residual_norm.default, (like, like), **streams, **options)
        carried = in_shape(put(total, ITEM, like, both, 1), total, total)
        assert carried is not None  # the sum is contiguous
        norm.replace_all_uses_with(put(total, ITEM, like, both, 0))
        total.replace_all_uses_with(carried)


def _streams(total: fx.Node, x: fx.Node, **found: Any) -> dict[str, fx.Node] | None:
    """The tensors of a sum of streams [..., N, H], by their names there; None if one of them does not fit."""
    residual, y, gate = found["R"], found["Y"], found["GATE"]
    are_numbers = all(isinstance(found[name], (int, float)) and found[name] != 0 for name in ("FACTOR", "N"))
    if not are_numbers or tensor_of(x).dim() < 2:
        return None
    (*leading, count, width), dtype = tensor_of(x).shape, tensor_of(total).dtype
    added: Any = next((each for each in total.args if each is not residual), residual)
    product = beneath(added)
    strength: Any = next((each for each in product.args if each is not y), y)
    shapes = [tensor_of(each).shape for each in (product, y, strength)]
    if shapes != [(*leading, count, width), (*leading, 1, width), (*leading, count, 1)]:
        return None
    parts = {
        "residual": in_shape(residual, x, total),
        "input": of_shape(y, [*leading, width]),
        "gate": of_shape(gate, [*leading, count]),
    }
    fitting = {
        name: each
        for name, each in parts.items()
        if each is not None and tensor_of(each).dtype == dtype and is_unchanged(each, each, total)
    }
    return fitting if fitting.keys() == parts.keys() else None
