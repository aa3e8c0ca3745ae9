"""Routers, and what they hand to their experts."""

from collections.abc import Callable
from typing import Any

from torch import fx

from ....ops._activations import POINTWISE, Activation
from ....ops.families.norms import InputNorm
from ....ops.families.quantized import MATRICES
from ..nodes import (
    arguments,
    aten,
    beneath,
    calls,
    changed,
    is_call,
    is_final,
    is_node,
    is_read_once,
    is_unchanged,
    ours,
    readers,
    tensor_of,
)
from ..patterns import match
from ..tracing import ITEM

_EXPERTS = (
    ours._moe_experts,
    ours._moe_experts_quantized,
    ours.moe_weighted_reduce,
    ours.expert_mm,
    ours.expert_qmm,
    ours._expert_slots,
)
# Arguments that have to be equal for an MLP and experts.
_ALIKE = ("format", "gate_up_bias", "down_bias", "gated", "interleaved", *InputNorm._fields)
_ROUTERS = (ours.moe_router, ours.moe_gate)
ROUTED = ("topk_weights", "topk_ids")  # results of a router, arguments of experts
# Functions of a router's call that give what `_options_of` does, for other routers than ours.
OPTIONS_OF: list[Callable[[fx.Node], dict[str, Any] | None]] = []


def hand_routing_over(graph: fx.Graph) -> None:
    """Experts read the weights and ids of a router as its operator gives them, not their casts."""
    for call in calls(graph, *_EXPERTS):
        passed = arguments(call)
        uncast = {name: _of_router(passed[name]) for name in ROUTED if name in passed}
        new = {name: value for name, value in uncast.items() if value is not None}
        if new:
            call.replace_all_uses_with(changed(call, call, **new))


def scale_in_router(graph: fx.Graph) -> None:
    """F(IDS, WEIGHTS) * SCALE -> F(IDS, WEIGHTS * SCALE), by the factor of the router"""
    for product in calls(graph, aten.mul):
        bound = match("SUM * SCALE", product) or {}
        factor = bound.get("SCALE")
        value: Any = product.args[0]
        if not is_node(value) or not isinstance(factor, (int, float)) or not is_read_once(value, product):
            continue
        experts = beneath(value)
        if not is_call(experts, ours._moe_experts, ours._moe_experts_quantized):
            continue
        passed = arguments(experts)
        weights: Any = passed["topk_weights"]
        router: Any = weights.args[0] if weights.target is ITEM and weights.args[1] == 0 else None
        is_alone = passed["residual"] is passed["shared_out"] is None and [*weights.users] == [experts]
        if is_alone and is_call(router, ours.moe_router):
            scaled = arguments(router)["scaling_factor"] * factor
            router.replace_all_uses_with(changed(router, router, scaling_factor=scaled))
            product.replace_all_uses_with(value)


def choose_in_experts(graph: fx.Graph) -> None:
    """F(WEIGHTS, IDS) of a router -> F(LOGITS): for one token, the experts' first product chooses them"""
    for call in calls(graph, ours._moe_experts_quantized):
        passed = arguments(call)
        weights, ids = (passed[name] for name in ROUTED)
        if ids is None or ids.target is not ITEM or weights.target is not ITEM or passed["has_identity"]:
            continue
        router: Any = ids.args[0]
        if ids.args != (router, 1) or weights.args != (router, 0):
            continue
        options = _options_of(router)
        if options is None or any(reader is not call for item in router.users for reader, _ in readers(item)):
            continue
        if is_unchanged(options["logits"], router, call):
            new = options | dict.fromkeys(ROUTED)
            call.replace_all_uses_with(changed(call, call, **new))


def shared_expert_in_experts(graph: fx.Graph) -> None:
    """F(X, LOGITS, shared_out=_mlp_quantized(X)) -> F(X, LOGITS, matrices of the shared expert), of one token

    Both products of the experts compute it then, if it is like one of them. Without a residual stream, the
    expert is what they have as residual.
    """
    for call in calls(graph, ours._moe_experts_quantized):
        passed = arguments(call)
        added = "residual" if passed["shared_out"] is None else "shared_out"
        mlp, x = passed[added] and beneath(passed[added]), passed["x"]
        if not is_call(mlp, ours._mlp_quantized) or not is_read_once(passed[added], call):
            continue
        shared = arguments(mlp)
        if (
            passed["logits"] is not None
            and tensor_of(x).shape[0] == 1
            and beneath(shared["x"]) is beneath(x)
            and is_unchanged(x, mlp, call)
            and _is_like_experts(shared, passed)
        ):
            new = {f"shared_{name}": shared[name] for name in MATRICES}
            if any(shared[name] != passed[name] for name in Activation._fields):
                new["shared_activation"] = shared["activation"]
            call.replace_all_uses_with(changed(call, call, **{added: None}, **new))


def _is_like_experts(shared: dict[str, Any], passed: dict[str, Any]) -> bool:
    """True if an MLP has the arguments of one of some experts, perhaps with another activation."""
    has_activation = shared["activation"] in POINTWISE or all(
        shared[n] == passed[n] for n in Activation._fields
    )
    return (
        has_activation
        and all(shared[name] == passed[name] for name in _ALIKE)
        and shared["gate_up_bias"] is shared["down_bias"] is shared["residual"] is None
        and (shared["down_format"] or shared["format"]) == (passed["down_format"] or passed["format"])
        and all(_is_like_one(shared[name], passed[name]) for name in MATRICES)
    )


def _is_like_one(matrix: fx.Node | None, stack: fx.Node | None) -> bool:
    """True if a matrix is like each of a stack."""
    if matrix is None or stack is None:
        return matrix is stack
    one, all_ = tensor_of(matrix), tensor_of(stack)
    return one.shape == all_.shape[1:] and one.dtype == all_.dtype


def _options_of(router: fx.Node) -> dict[str, Any] | None:
    """The logits of a router and its options; None if experts have no such."""
    if is_call(router, ours.moe_router):
        return {name: value for name, value in arguments(router).items() if name != "ids_dtype"}
    known = (read(router) for read in OPTIONS_OF)
    return next((options for options in known if options is not None), None)


def _of_router(value: Any) -> fx.Node | None:
    """A router's result before its cast; None for another value."""
    while is_call(value, aten._to_copy) and is_final(value):
        value = value.args[0]
    is_result = value.target is ITEM and is_call(value.args[0], *_ROUTERS) and is_final(value)
    return value if is_result else None
