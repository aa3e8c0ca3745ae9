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


def gated_norm_forward(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """The forward of a rewritten norm."""
    if x.shape != gate.shape or (options := _options(norm, x, gate)) is None:
        return original_class(norm).forward(norm, x, gate)
    return ops.rms_norm_gated(x, gate, *options)


def _options(norm: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, float, float] | None:
    """The weight, eps and offset of a rewritten norm, None where an operator cannot run it."""
    formula: NormFormula = norm.__dict__[STATE].formula
    weight = getattr(norm, formula.weight)
    fits = x.dtype == gate.dtype and x.shape[-1:] == weight.shape and weight.dtype in ACTIVATION_DTYPES
    if not fits or not x.device == gate.device == weight.device:
        return None
    return weight, formula.eps, formula.offset


def rewrite_gated_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a norm with a gate, else None."""
    norm = gated_norm_formula(module)
    if norm is None or not norm.weight or not norm.keeps_dtype:
        return None
    if module.get_parameter(norm.weight).shape[0] > _WIDEST:
        return None
    state_of(module).formula = norm
    return gated_norm_forward, [Done("rms_norm_gated")]
