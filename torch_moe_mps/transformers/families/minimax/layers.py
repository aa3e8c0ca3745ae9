"""Lightning attention: a constant decay a head."""

from typing import Any

import torch
from torch import Tensor

from ...basics.tensors import uncommitted_of
from ...modules.rules.recurrent_layers import is_seen, masked
from ...trials.replicas import replica_of

ops = torch.ops.moe_mps
_DECAYS = "query_decay", "key_decay", "diagonal_decay"


def lightning_layer(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    cache: Any = None,
) -> tuple[Tensor, Tensor]:
    heads, width = layer.num_attention_heads, layer.head_dim
    if is_seen(layer):
        return NotImplemented
    mixed, gate = layer.qkv_proj(hidden_states), layer.output_gate(hidden_states)
    mixed = masked(layer.act_fn(mixed), attention_mask).unflatten(-1, (heads, 3 * width))
    held = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    shape = hidden_states.shape[0], heads, width, width
    state = torch.zeros(shape, device=mixed.device) if held is None else held.float()
    q, k, v = mixed.split_with_sizes([width] * 3, -1)
    pending = uncommitted_of(state, q.shape[1])
    out = ops.linear_attention_(q, k, v, -layer.slope_rate.view(-1), state, 1.0, delta=False, **pending)
    norm = layer.norm
    out = ops.rms_norm_gated(out.flatten(2), gate, norm.weight, norm.variance_epsilon, activation="sigmoid")
    if cache is not None and held is not state:
        cache.set_linear_cache(layer.layer_idx, state)
    return layer.out_proj(out), state


def has_usual_decays(layer: Any) -> bool:
    """True if the buffers of blocks are what eager code makes of the rates, which alone are read here."""
    decays, found = layer.decay_factors(layer.slope_rate), (getattr(layer, name) for name in _DECAYS)
    atol = 1e-5 if layer.slope_rate.dtype == torch.float32 else 1e-2
    return all(torch.allclose(a, b, 0.0, atol) for a, b in zip(found, decays, strict=True))


def lightning_replica(layer: Any) -> Any:
    """A replica with decays of random rates."""
    replica = replica_of(layer)
    replica.slope_rate = replica.slope_rate.abs()
    for name, decay in zip(_DECAYS, replica.decay_factors(replica.slope_rate), strict=True):
        setattr(replica, name, decay)
    return replica
