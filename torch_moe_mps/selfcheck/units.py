"""Tensor units of this machine: what it lacks for them, in our kernels and in torch's attention.

Chunks of a prompt run torch's attention where it has them and the probe has measured that it is faster.
"""

import functools

import torch

from .._extension import torch_version
from .._versions import SDPA_ON_UNITS, TENSOR_UNITS, dotted
from ..macs import macos
from .machine import SDPA, was_faster


def why_no_units() -> str:
    """Why nothing runs on tensor units here; empty if it may."""
    if (system := macos()) is not None and system < TENSOR_UNITS:
        return f"they need macOS {dotted(TENSOR_UNITS)} or newer, this is {dotted(system)}"
    return torch.ops.moe_mps._why_no_tensor_units()


def why_no_sdpa() -> str:
    """Why torch's attention has no kernel for tensor units here; empty if it has."""
    if torch_version() < SDPA_ON_UNITS:
        return f"it needs torch {dotted(SDPA_ON_UNITS)} or newer, this is {torch.__version__}"
    return why_no_units()


@functools.cache
def chunks_run_sdpa() -> bool:
    """True if chunks of a prompt behind other tokens run torch's attention, on tensor units."""
    return not why_no_sdpa() and was_faster(SDPA)
