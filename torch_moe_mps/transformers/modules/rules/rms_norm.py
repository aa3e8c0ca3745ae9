"""RMSNorms: one operator each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....ops.norms import rms_norm
from ...basics.report import Done
from ...basics.state import STATE, original_class
from .norms import is_norm, norm_arguments


def rms_norm_forward(norm: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
    """The forward of a norm that has been rewritten itself, whatever its argument is called."""
    (x,) = args or named.values()
    groups: int = norm.__dict__[STATE].formula.groups
    arguments = None if x.dtype is torch.float64 else norm_arguments(norm, x, groups)
    if arguments is None:
        return original_class(norm).forward(norm, x)
    if groups == 1:
        return rms_norm(x, *arguments)
    weight, *options = arguments
    weight = None if weight is None else weight.view(groups, -1)
    return rms_norm(x.unflatten(-1, (groups, -1)), weight, *options).flatten(-2)


def rewrite_rms_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for an RMSNorm, else None."""
    return (rms_norm_forward, [Done("rms_norm")]) if is_norm(module, grouped=True) else None
