"""JetMoe's routers and experts.

The model's own router sorts pairs of tokens and experts by expert, and says how many pairs each expert has,
which only the GPU knows. Here pairs keep their order: in place of the counts the router gives the expert of
each pair, and experts take that. The code between them, of MLPs and of attention, gathers and adds by the
indices of pairs, in any order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import original_class, with_eager
from ...modules.experts import is_observed
from ...trials.comparing import agrees
from ...trials.draws import eager, normal
from ...trials.forms import Tried
from ...trials.replicas import replica_of

ops = torch.ops.moe_mps
_PARTS = "router", "input_linear", "output_linear"
# The attribute of a router and its experts that says that all of them keep the order of pairs.
_IN_ORDER = "_moe_mps_in_order"
_SCORING = "softmax_after_topk"


def mark_blocks(model: nn.Module) -> None:
    """Marks routers and experts that are all known: what one gives, the others take."""
    for block in model.modules():
        parts = [block._modules.get(name) for name in _PARTS]
        if all(parts):
            are_known = _are_known(*parts)
            for part in parts:
                setattr(part, _IN_ORDER, are_known)


def _are_known(router: Any, *experts: Any) -> bool:
    has_parts = hasattr(router, "top_k") and _is_router(router)
    stacks = [part._parameters.get("weight") for part in experts]
    if not has_parts or any(stack is None or stack.dim() != 3 for stack in stacks):
        return False
    return _ROUTER.matches(router) and all(map(_EXPERTS.matches, experts))


def _is_router(part: nn.Module) -> bool:
    return "layer" in part._modules


def gating(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward of a rewritten router: pairs in order, their tokens, weights and experts; the logits."""
    logits = router.layer(hidden_states).float()
    weights, ids = ops.moe_router(logits, router.top_k, scoring=_SCORING, norm_topk_prob=False)
    pairs = torch.arange(ids.numel(), device=ids.device)
    tokens = pairs.div(router.top_k, rounding_mode="trunc")
    return pairs, tokens, weights.to(hidden_states.dtype).flatten(), ids, logits


def own_experts(experts: Any, inputs: Tensor, expert_size: Any) -> Any:
    """The experts' eager code, also for pairs in order."""
    own = original_class(experts).forward
    if not isinstance(expert_size, Tensor):
        return own(experts, inputs, expert_size)
    ids = expert_size.flatten().long()
    order, counts = ids.argsort(stable=True), ids.bincount(minlength=experts.num_experts)
    return own(experts, inputs[order], counts.tolist())[order.argsort()]


@with_eager(own_experts)
def parallel_experts(experts: Any, inputs: Tensor, expert_size: Any) -> Tensor:
    """The forward of rewritten experts [E, N, H]: of inputs [P, H] with an expert each."""
    if not isinstance(expert_size, Tensor):
        return NotImplemented
    return ops.expert_mm(inputs, experts.weight, expert_size.view(-1, 1)).squeeze(1)


def block_of_experts(block: Any, layer_input: Tensor) -> Tensor:
    """The forward of a rewritten block of MLPs."""
    x = layer_input.reshape(-1, layer_input.shape[-1])
    if is_observed(block.input_linear, block.output_linear):
        return NotImplemented
    _, _, weights, ids, _ = block.router(x)
    if not isinstance(ids, Tensor):  # the router runs its eager code
        return NotImplemented
    stacks = block.input_linear.weight, block.output_linear.weight
    out = ops.moe_experts(x, *stacks, ids, weights.view_as(ids))
    return out.view(layer_input.shape) + block.bias


def rewrite_part(module: nn.Module) -> tuple[Any, list[Done]] | None:
    """(forward, what runs) for a marked router or its experts, else None."""
    if not getattr(module, _IN_ORDER, False):
        return None
    return _ROUTER(module) or _EXPERTS(module)


def _has_marked_parts(module: nn.Module) -> bool:
    parts = [module._modules.get(name) for name in _PARTS]
    return all(getattr(part, _IN_ORDER, False) for part in parts) and "activation" in module._modules


def _matches_router(module: Any, forward: Callable) -> bool:
    """True if a router chooses and weighs as a forward does, and sorts pairs by expert."""
    replica = replica_of(module)
    x = normal(9, replica.layer.in_features)
    pairs, tokens, weights, counts, logits = eager(original_class(module).forward)(replica, x)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    _, own_tokens, own_weights, ids, own_logits = forward(replica, x)
    dense = torch.zeros_like(logits)
    theirs = dense.index_put((tokens, experts), weights)
    ours = dense.index_put((own_tokens, ids.flatten().long()), own_weights)
    in_order = torch.equal(pairs.sort()[0], torch.arange(len(pairs)))
    return (
        in_order
        and torch.equal(tokens, pairs // replica.top_k)
        and agrees([ours, own_logits], [theirs, logits])
    )


def _matches_experts(module: Any, forward: Callable) -> bool:
    """True if experts multiply the inputs of each expert with its matrix."""
    replica = replica_of(module)
    ids = torch.arange(7).remainder(len(replica.weight)).view(-1, 1)
    x = normal(7, replica.weight.shape[2])
    return agrees(forward(replica, x, ids), eager(own_experts)(replica, x, ids))


def _matches_block(module: Any, forward: Callable) -> bool:
    """True if a block of MLPs is a forward behind a rewritten router."""
    replica = replica_of(module)
    x = normal(2, 5, replica.router.layer.in_features)
    expected = eager(original_class(module).forward)(replica, x)
    replica.router.forward = lambda hidden: gating(replica.router, hidden)
    return agrees(forward(replica, x), expected, 1e-4)


_ROUTES, _MULTIPLIES = Done("moe_router", f"moe_router ({_SCORING})"), Done("expert_mm")
_ROUTER = Tried(_is_router, gating, _matches_router, (_ROUTES, _MULTIPLIES))
_EXPERTS = Tried(
    lambda part: not _is_router(part), parallel_experts, _matches_experts, (_MULTIPLIES, _ROUTES)
)
block = Tried(
    _has_marked_parts, block_of_experts, _matches_block, (Done("moe_experts", "moe_experts (silu)"),)
)
