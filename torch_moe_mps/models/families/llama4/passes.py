"""Norms of rotated heads without a weight, and weights of experts that multiply their inputs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...basics.tensors import constant
from ...graphs.fusion import Fusion
from ...graphs.nodes import (
    arguments,
    aten,
    calls,
    changed,
    is_call,
    is_final,
    is_reshaped,
    ours,
    tensor_of,
)
from ...graphs.passes.linears import constant_of, set_values
from ...graphs.passes.rotation import results_of
from ...graphs.passes.simplify import share_views
from ...graphs.patterns import match

# Before their sum is rounded, a router's weights do for a row of inputs what they do for the inputs.
weights_on_inputs = Fusion(
    "weights_on_inputs",
    (
        "_moe_experts_quantized(X[..., H] * W[..., 1], ones_like(IDS, *O), IDS, *A[T, H])",
        "_moe_experts_quantized(X[T, H], W[T, 1], IDS, *A, weights_on_inputs=True)",
    ),
    where=lambda T, **_: T == 1,
)


def norms_behind_rotation(graph: fx.Graph) -> None:
    """rms_norm(rope(Q)) -> rope(Q, norm), without a weight: a turn by angles keeps a head's length."""
    for call in calls(graph, ours.rope):
        passed, new = arguments(call), dict[str, Any]()
        if passed["cos"] is None or passed["rotary_dim"] is None or not _are_of_angles(passed):
            continue
        if passed["q_norm_weight"] is not None or passed["k_norm_weight"] is not None:
            continue
        for name, result in results_of(call).items():
            norm = _only_norm_of(result)
            if (
                norm is None
                or new.get("norm_eps", arguments(norm)["norm_eps"]) != arguments(norm)["norm_eps"]
            ):
                continue
            source, like = norm.all_input_nodes[0], tensor_of(passed[name])
            if set_values([norm], [tensor_of(source)]):
                norm.replace_all_uses_with(source)
                ones = constant(("ones", like.device, like.dtype, like.shape[-1]), partial(_ones, like))
                new |= {"norm_eps": arguments(norm)["norm_eps"], "norm_weight_offset": 0.0}
                new[f"{name}_norm_weight"] = constant_of(call, ones, [])
        if new:
            call.replace_all_uses_with(changed(call, call, **new))
            share_views(graph)  # a norm's input and result are transposes of each other


_POLAR = "permute(view_as_real(polar(ones_like(A, *O), A)), [3, 0, 1, 2])"


def _are_of_angles(passed: dict[str, Any]) -> bool:
    """True if tables are the cosines and sines of an angle for each pair."""
    if passed["rotary_dim"] != 2 * tensor_of(passed["cos"]).shape[-1]:
        return False
    cos, sin = (
        match(f"item(unbind(clone({_POLAR}, *C), -4), {n})", passed[name])
        for n, name in enumerate(("cos", "sin"))
    )
    return cos is not None and sin is not None and cos["A"] is sin["A"]


def _only_norm_of(heads: fx.Node) -> fx.Node | None:
    """The RMSNorm of whole heads, without a weight, that alone reads them; None for other readers."""
    value = heads
    while len(value.users) == 1:
        (user,) = value.users
        if is_call(user, ours.rms_norm):
            _, weight, _, _, factor = arguments(user).values()
            is_of_heads = tensor_of(value).shape[-1] == tensor_of(heads).shape[-1]
            is_plain = weight is None and factor == 1.0 and tensor_of(user).dtype == tensor_of(value).dtype
            return user if is_of_heads and is_plain and is_final(user) else None
        if not is_call(user, aten.transpose) and not is_reshaped(user):
            break
        value = user
    return None


def _ones(like: Tensor) -> Tensor:
    return torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
