"""RMSNorms of one token, which the operators behind them can apply to their input.

With more tokens each operator would have to norm all of them again.
"""

from typing import Any

import torch
from torch import fx

from ....ops._checks import dtype_name
from ..nodes import (
    arguments,
    calls,
    changed,
    in_shape,
    is_call,
    is_unchanged,
    ours,
    put,
    readers,
    tensor_of,
)
from ..patterns import linear_of

_TAKING = (
    ours.linear_quantized,
    ours._mlp_quantized,
    ours._moe_experts,
    ours._moe_experts_quantized,
    ours.router_logits,
)
MOST_ROWS = 513  # largest dense matrix of `router_logits`: a router and a gate. Not measured.


def norm_in_operators(graph: fx.Graph) -> None:
    """F(rms_norm(X)) -> F(X, norm), if all that read the norm can apply it."""
    for norm in calls(graph, ours.rms_norm):
        x, weight, eps, offset, factor = arguments(norm).values()
        if weight is None or factor != 1.0 or tensor_of(norm).numel() != tensor_of(weight).numel():
            continue
        if tensor_of(weight).dtype not in (torch.float32, tensor_of(x).dtype):  # a dispatch for each reader
            continue
        reads, size = list(readers(norm)), tensor_of(weight).shape
        if any(tensor_of(value).shape[-1:] != size for _, value in reads):
            continue
        if not all(_can_norm(*read) and is_unchanged(x, norm, read[0]) for read in reads):
            continue
        options = {"norm_weight": weight, "norm_eps": eps, "norm_weight_offset": offset}
        for reader, value in reads:
            source = in_shape(x, value, reader)
            if source is None:
                break
            reader.replace_all_uses_with(_with_norm(reader, source, options))


def _with_norm(reader: fx.Node, x: fx.Node, options: dict[str, Any]) -> fx.Node:
    if is_call(reader, *_TAKING):
        return changed(reader, reader, x=x, **options)
    matmul, like = linear_of(reader), tensor_of(reader)
    assert matmul is not None
    arguments = {"x": x, "weight": matmul[1], "bias": matmul[2], "dtype": dtype_name(like.dtype)}
    return put(reader, ours.router_logits.default, like, **arguments, **options)


def _can_norm(reader: fx.Node, value: fx.Node) -> bool:
    if is_call(reader, *_TAKING):
        passed = arguments(reader)
        return (
            passed["x"] is value and passed["norm_weight"] is None and list(passed.values()).count(value) == 1
        )
    matmul = linear_of(reader)
    if matmul is None or matmul[0] is not value or tensor_of(value).dim() != 2:
        return False
    if matmul[1].op != "get_attr" or tensor_of(matmul[1]).dtype != tensor_of(value).dtype:
        return False
    return tensor_of(reader).shape[-1] <= MOST_ROWS
