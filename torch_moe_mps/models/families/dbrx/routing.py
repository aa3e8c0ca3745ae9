"""DBRX's blocks: the softmax of a router's logits, divided by the norm of the chosen ones.

weights, ids = the top k of softmax(router(x))
weights = weights / (sum over k of weights^p)^(1 / p)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import Unsupported
from ...modules.stacked_experts import Sizes, beside_replica
from ...trials.draws import magnitude
from ...trials.forms import first_form
from .experts import sizes_of

ops = torch.ops.moe_mps

_SHAPE = 2, 3  # shape of a trial's tokens


def rewrite_routing(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for such a block, else None.

    Raises: Unsupported for a norm that moe_router does not divide by.
    """
    router, experts = (module._modules.get(name) for name in ("router", "experts"))
    sizes = None if router is None or experts is None else sizes_of(experts)
    attributes = vars(module)
    if sizes is None or not {"top_k", "moe_normalize_expert_weights"} <= attributes.keys():
        return None
    p = attributes["moe_normalize_expert_weights"]
    if p not in (None, 1):
        raise Unsupported(f"it divides the weights by their norm of p = {p}")
    if not first_form(module, (True,), _begin, sizes):
        return None
    return routing_forward, [Done("moe_router", "moe_router (softmax)")]


def routing_forward(module: Any, hidden_states: Tensor) -> Any:
    """The forward of such a block."""
    logits = module.router(hidden_states)
    is_normed = module.moe_normalize_expert_weights is not None
    weights, ids = ops.moe_router(
        logits, module.top_k, scoring="softmax", norm_topk_prob=is_normed, sum_eps=0.0
    )
    return module.experts(hidden_states, ids.long(), weights.to(logits.dtype))


def _begin(module: Any, sizes: Sizes) -> Callable[[bool], bool]:
    ours = lambda _, *given: routing_forward(*given)  # noqa: E731
    return beside_replica(module, sizes, ours, module.top_k + 1, _inputs)


def _inputs(replica: Any, small: Sizes) -> tuple[Tensor]:
    x = torch.randn(*_SHAPE, small.hidden) * max(magnitude(), 1.0)  # smaller logits have equal softmax
    layer = replica.router.layer
    layer.weight = nn.Parameter(torch.randn(layer.weight.shape), requires_grad=False)
    return (x,)
