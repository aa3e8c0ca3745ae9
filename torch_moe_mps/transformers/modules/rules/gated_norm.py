"""RMSNorms whose result a gate multiplies: rms(x) * weight * silu(gate)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from .norms import NormFormula, gated_norm_formula

ops = torch.ops.moe_mps

_WIDEST = 1024  # a norm of heads is not wider


def gated_norm_forward(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The forward of a rewritten norm."""
    formula: NormFormula = norm.__dict__[STATE].formula
    weight = getattr(norm, formula.weight)
    same = x.shape == gate.shape and x.dtype == gate.dtype and x.device == gate.device == weight.device
    if not same or x.shape[-1:] != weight.shape or weight.dtype not in ACTIVATION_DTYPES:
        return original_class(norm).forward(norm, x, gate)
    return ops.rms_norm_gated(x, gate, weight, formula.eps, formula.offset)


def rewrite_gated_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a norm with a gate, else None."""
    norm = gated_norm_formula(module)
    if norm is None or not norm.weight or not norm.keeps_dtype or norm.groups > 1:
        return None
    if module.get_parameter(norm.weight).shape[0] > _WIDEST:
        return None
    state_of(module).formula = norm
    return gated_norm_forward, [Done("rms_norm_gated")]
