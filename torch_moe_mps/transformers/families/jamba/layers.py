"""Mamba-1 with norms of its time step, B and C."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modules.rules.recurrent_layers import convolution, masked, scan, with_cache

ops = torch.ops.moe_mps


@with_cache
def selective_layer(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    states = layer.ssm_state_size
    mixed, gate = layer.in_proj(x).chunk(2, -1)
    mixed = masked(convolution(layer, mixed, cache), mask)
    widths = [layer.time_step_rank, states, states]
    norms = layer.dt_layernorm, layer.b_layernorm, layer.c_layernorm
    parts = zip(layer.x_proj(mixed).split_with_sizes(widths, -1), norms, strict=True)
    step, b, c = (ops.rms_norm(part, item.weight, item.variance_epsilon) for part, item in parts)
    step = F.linear(step, layer.dt_proj.weight)
    options = {"dt_bias": layer.dt_proj.bias, "skip": layer.D, "gate": gate}
    out = scan(
        cache,
        layer.layer_idx,
        (*mixed.shape[::2], states),
        x,
        lambda state: ops.selective_scan_(mixed, step, b, c, state, layer.A_log, **options),
        begins_anew=x.shape[1] > 1,  # the model's prompts do so, whatever the cache holds
    )
    return layer.out_proj(out)
