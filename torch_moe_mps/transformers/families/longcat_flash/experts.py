"""LongCat-Flash's experts: those behind the routed ones have no weights, and give back their input.

The model's eager code asks the GPU which experts any token has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import original_class
from ...modules.experts import is_observed
from ...trials.comparing import agrees
from ...trials.draws import eager, is_first_kind, normal
from ...trials.forms import Tried
from ...trials.replicas import replica_of

ops = torch.ops.moe_mps


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of rewritten experts."""
    if is_observed(*experts._modules.values()):
        return NotImplemented
    routed = experts.num_routed_experts
    stacks = experts.gate_up_proj[:routed], experts.down_proj
    out = ops.moe_experts(hidden_states, *stacks, top_k_index, top_k_weights)  # ids behind the stacks give 0
    given_back = (top_k_weights * (top_k_index >= routed)).sum(-1, keepdim=True)
    return (out + hidden_states * given_back).to(hidden_states.dtype)


def _may_be(module: nn.Module) -> bool:
    """True if some of a module's experts have no weights."""
    has_parts = "identity_expert" in module._modules and hasattr(module, "num_routed_experts")
    return has_parts and module._parameters.get("gate_up_proj") is not None


def _is_same(module: Any, forward: Callable) -> bool:
    replica = replica_of(module)
    tokens = 7 if is_first_kind() else 1  # one leaves experts without any
    slots = min(3, replica.total_experts)
    x = normal(tokens, replica.hidden_size)
    ids = torch.arange(tokens * slots).remainder(replica.total_experts).view(tokens, slots)
    weights = normal(tokens, slots)
    expected = eager(original_class(module).forward)(replica, x, ids, weights)
    return agrees(forward(replica, x, ids, weights), expected, 1e-4)


experts = Tried(_may_be, experts_forward, _is_same, (Done("moe_experts", "moe_experts (silu)"),))
