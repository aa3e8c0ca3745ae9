"""Routers whose logits are computed from copies in float32."""

import torch
from torch import fx

from ...graphs.nodes import aten, calls, is_unchanged, ours, put, tensor_of
from ...graphs.passes.norms import MOST_ROWS
from ...graphs.patterns import before_widening, linear_of

FEW_ROWS = 32  # most tokens of a kernel of router_logits


def logits_in_float32(graph: fx.Graph) -> None:
    """linear(X, W) of copies in float32, of few rows -> router_logits(X, W)"""
    for call in calls(graph, aten.mm, aten.addmm, aten.linear):
        linear, like = linear_of(call), tensor_of(call)
        if linear is None or like.dtype != torch.float32 or like.dim() != 2 or not like.shape[0] <= FEW_ROWS:
            continue
        x, *weights = map(before_widening, linear)
        if [x, *weights] == [*linear] or any(item is not None and item.op != "get_attr" for item in weights):
            continue
        if like.shape[1] <= MOST_ROWS and is_unchanged(x, x, call):
            call.replace_all_uses_with(put(call, ours.router_logits.default, like, x, *weights))
