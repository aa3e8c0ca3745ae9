"""Mamba-1 in heads, whose steps, B and C come from projections of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...basics.state import with_own
from ...basics.uncommitted import uncommitted_of
from ...modules.rules.recurrent_layers import convolution, masked, own_selective_layer, scan, with_cache

ops = torch.ops.moe_mps


@with_own(own_selective_layer)
@with_cache
def heads_layer(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    heads, states, rank = layer.n_mamba_heads, layer.ssm_state_size, layer.time_step_rank
    mixed, gate = layer.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
    mixed = masked(convolution(layer, mixed, cache), mask)
    of_heads = [*zip(mixed.chunk(heads, -1), gate.chunk(heads, -1), strict=True)]

    def scanned(state: Tensor) -> Tensor:
        """Results of all heads, one behind the other, like their uncommitted tokens."""
        pending, results = uncommitted_of(state, x.shape[1]), []
        for number, (own, its_gate) in enumerate(of_heads):
            given = {**pending}
            if pending:
                given["pending_"] = pending["pending_"].chunk(heads, 1)[number]
            projected = F.linear(own, layer.x_proj_weight[number])
            step, b, c = projected.split_with_sizes([rank, states, states], -1)
            step = F.linear(step, layer.dt_proj_weight[number])
            out = ops.selective_scan_(
                *(own, step, b, c, state[:, number], layer.A_log[number]),
                dt_bias=layer.dt_proj_bias[number],
                skip=layer.D[number],
                gate=its_gate,
                **given,
            )
            results.append(out)
        return torch.cat(results, -1)

    shape = x.shape[0], heads, mixed.shape[-1] // heads, states
    return layer.out_proj(scan(cache, layer.layer_idx, shape, x, scanned))
