"""Mamba-2 with factors in front of and behind its first projection, and a gate without a norm or in one."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...modules.rules.recurrent_layers import mamba_scan, with_cache


@with_cache
def scaled_mamba(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    projected = layer.in_proj(x * layer.ssm_in_multiplier) * layer.mup_vector
    out, gate = mamba_scan(layer, projected, cache, mask)
    out = layer.norm(out, gate) if layer.mamba_rms_norm else out * F.silu(gate)
    return layer.out_proj(out.to(x.dtype))
