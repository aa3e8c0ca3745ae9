"""RMSNorms: one operator each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import original_class
from .norms import is_norm, norm_arguments

ops = torch.ops.moe_mps


def rms_norm_forward(norm: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
    """The forward of a norm that has been rewritten itself, whatever its argument is called."""
    (x,) = args or named.values()
    arguments = None if x.dtype is torch.float64 else norm_arguments(norm, x)
    return original_class(norm).forward(norm, x) if arguments is None else ops.rms_norm(x, *arguments)


def rewrite_rms_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for an RMSNorm, else None."""
    return (rms_norm_forward, [Done("rms_norm")]) if is_norm(module) else None
