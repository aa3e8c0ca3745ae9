"""Convolutions to which their input is added, and routers whose product is in float32."""

import torch
from torch import fx

from ...graphs.fusion import Fusion
from ...graphs.nodes import aten, calls, is_unchanged, ours, put, tensor_of
from ...graphs.patterns import before_widening, linear_of

_FEW_ROWS = 32  # most rows of a kernel of router_logits

# Rounds as models do, which compute in float32 and round to the dtype that X had.
input_in_convolution = Fusion(
    "input_in_convolution",
    ("causal_conv1d_update_(X, *A) + X", "causal_conv1d_update_(X, *A, add_input=True)"),
    ("_to_copy(causal_conv1d_update_(X, *A), dtype=D)", "causal_conv1d_update_(X, *A)"),
)


def logits_in_float32(graph: fx.Graph) -> None:
    """linear(X, W) of copies in float32, of few rows -> router_logits(X, W)"""
    for call in calls(graph, aten.mm, aten.addmm, aten.linear):
        linear, like = linear_of(call), tensor_of(call)
        if linear is None or like.dtype != torch.float32 or like.dim() != 2 or not like.shape[0] <= _FEW_ROWS:
            continue
        x, *weights = map(before_widening, linear)
        if [x, *weights] == [*linear] or any(
            weight is not None and weight.op != "get_attr" for weight in weights
        ):
            continue
        if is_unchanged(x, x, call):
            call.replace_all_uses_with(put(call, ours.router_logits.default, like, x, *weights))
