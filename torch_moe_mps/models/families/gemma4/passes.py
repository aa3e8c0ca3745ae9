"""A router that norms, multiplies, selects and scales, as one operator, and the factor of a layer."""

from typing import Any

import torch
from torch import Tensor, fx

from ....ops._checks import MAX_TOP_K
from ...graphs.fusion import Fusion
from ...graphs.nodes import arguments, aten, calls, is_call, is_unchanged, ours, put, tensor_of
from ...graphs.patterns import match
from ...graphs.tracing import ITEM, VALUE

_WEIGHTS = "item(T, 0) / sum(item(T, 0), [-1], True) * index(PER_EXPERT, [item(T, 1)])"
_CHOICE = "topk(_softmax(linear(rms_norm(X, None, EPS) * SCALE * ROOT, LINEAR, None), -1, False), K)"

scale_norm_sums = Fusion(
    "scale_norm_sums",
    (
        "fused_norm_add(R, X, W, EPS, OFFSET) * SCALAR",
        "fused_norm_add_scalar(R, X, W, SCALAR, EPS, OFFSET)",
    ),
)


def gate_in_one(graph: fx.Graph) -> None:
    """topk(softmax(linear(rms_norm(X) * SCALE))), its weights * SCALES[IDS] -> moe_gate(X)"""
    for weights in calls(graph, aten.mul):
        bound = match(_WEIGHTS, weights)
        bound = bound and match(_CHOICE, bound["T"], bound)
        if not bound or not _fits(bound) or not is_unchanged(bound["X"], bound["X"], weights):
            continue
        choice = bound["T"]
        scale = put(choice, aten.mul.Tensor, tensor_of(bound["SCALE"]), bound["SCALE"], bound["ROOT"])
        of_experts = bound["LINEAR"], scale, bound["PER_EXPERT"], bound["K"]
        numbers = {"norm_eps": bound["EPS"], "renormalize_after_scale": False}
        results = tensor_of(weights).float(), choice.meta[VALUE][1].int()
        gate = put(choice, ours.moe_gate.default, results, bound["X"], *of_experts, **numbers)
        ids = [user for user in choice.users if user.args[1] == 1]
        for number, old in enumerate((weights, *ids)):
            item = put(choice, ITEM, results[number], gate, number)
            old.replace_all_uses_with(_cast(item, tensor_of(old), choice))


def options_of_gate(router: fx.Node) -> dict[str, Any] | None:
    """Logits, by a call in front of it, and options of a moe_gate, which experts take in its place."""
    if not is_call(router, ours.moe_gate) or arguments(router)["renormalize_after_scale"]:
        return None
    hidden, weight, norm, scale, top_k, eps, *_ = arguments(router).values()
    factor = 1.0
    if is_call(norm, aten.mul) and not isinstance(norm.args[1], fx.Node):
        norm, factor = norm.args
    like = tensor_of(hidden).new_empty(
        tensor_of(hidden).shape[0], len(tensor_of(weight)), dtype=torch.float32
    )
    logits = put(
        router, ours.router_logits.default, like, hidden, weight, None, norm, norm_eps=eps, factor=factor
    )
    chosen = {"scoring": "softmax_after_topk", "per_expert_scale": scale}
    return {"logits": logits, "top_k": top_k, **chosen}


def _fits(found: dict[str, Any]) -> bool:
    """True if moe_gate takes what the names of the formulas stand for."""
    x, linear, vectors = found["X"], found["LINEAR"], [found["SCALE"], found["PER_EXPERT"]]
    return (
        tensor_of(x).dim() == 2
        and all(item.op == "get_attr" for item in (linear, *vectors))
        and all(tensor_of(vector).dim() == 1 for vector in vectors)
        and isinstance(found["ROOT"], (int, float))
        and 1 <= found["K"] <= MAX_TOP_K
    )


def _cast(value: fx.Node, like: Tensor, before: fx.Node) -> fx.Node:
    if tensor_of(value).dtype == like.dtype:
        return value
    return put(before, aten._to_copy.default, like, value, dtype=like.dtype)
