"""ZAYA's projection to queries, keys and values.

Two convolutions mix queries and keys. The cache holds what the first one reads, whose results for positions
in front of the new ones are what the second one reads; and half of the last value, which the next token gets.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import original_class
from ...basics.tensors import uncommitted_of
from ...modules.experts import is_observed
from ...modules.rules.recurrent_layers import CONVOLUTION, convolved, masked
from ...trials.comparing import agrees
from ...trials.draws import eager, normal
from ...trials.forms import Tried
from ...trials.replicas import LinearCache, replica_of
from ...upstream.calls import cache_argument, in_place

ops = torch.ops.moe_mps
_CHILDREN = "q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"


def projected(
    module: Any, hidden_states: Tensor, cache: Any = None, conv_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, T, heads, D]."""
    depthwise, grouped = module.conv_qk_depthwise, module.conv_qk_grouped
    if is_observed(depthwise):
        return NotImplemented
    x, before = masked(hidden_states, conv_mask), grouped.kernel_size[0] - 1
    q, k = module.q_proj(x), module.k_proj(x)
    mixed = convolved(depthwise, "none", torch.cat((q, k), -1), cache, module.layer_idx, before)
    mixed = grouped(mixed.mT).mT
    of_heads = -1, module.head_dim
    groups = module.num_key_value_heads, module.num_key_value_groups, module.head_dim
    # Means of a head of keys and each of its heads of queries.
    means = (q.unflatten(-1, groups) + k.unflatten(-1, of_heads).unsqueeze(-2)) * 0.5
    mixed_q, mixed_k = (part.unflatten(-1, of_heads) for part in mixed.split((q.shape[-1], k.shape[-1]), -1))
    values = torch.cat((module.v_proj_current(x), _delayed(module, x, cache)), -1)
    return mixed_q + means.flatten(-3, -2), mixed_k + means.mean(-2), values.unflatten(-1, of_heads)


def _delayed(module: Any, x: Tensor, cache: Any) -> Tensor:
    """Values of each token's predecessor, and the state of the cache."""
    number, values = module.layer_idx, module.v_proj_delayed(x)
    state = None if cache is None else cache.get_recurrent_state(number)
    if state is None:
        state = module.v_proj_delayed(x.new_zeros(len(x), 1, x.shape[-1]))[:, 0]
        if cache is not None:
            state = cache.update_recurrent_state(state, number)
    one = state.unsqueeze(-1)
    pending = uncommitted_of(state, x.shape[1])
    return ops.causal_conv1d_update_(values, one, None, None, "none", before=1, **pending)[:, :-1]


def _may_be(module: nn.Module) -> bool:
    return all(name in module._modules for name in _CHILDREN)


def _is_same(module: nn.Module, forward: Callable) -> bool:
    """True if a forward gives the results and the states of a module's own."""
    replica, own = replica_of(module), original_class(module).forward
    x, mask = normal(2, 9, replica.q_proj.in_features), torch.ones(2, 5)
    mask[0, :2] = 0
    found = []
    for run in (eager(own), in_place(own, forward)):
        copied, cache = copy.deepcopy(replica), LinearCache(layer_idx=replica.layer_idx)
        chunks = (
            (x[:, :5], mask, None),
            (x[:, :5], mask, cache),
            (x[:, 5:6], None, cache),
            (x[:, 6:], None, cache),
        )
        results = [
            run(copied, piece, **cache_argument(own, held), conv_mask=hidden)
            for piece, hidden, held in chunks
        ]
        layer = cache.layer
        found.append(
            [*(part for parts in results for part in parts), layer.conv_states[0], layer.recurrent_states[0]]
        )
    theirs, ours = found
    return agrees(ours, theirs, 1e-4)


projection = Tried(_may_be, projected, _is_same, (Done(CONVOLUTION),))
