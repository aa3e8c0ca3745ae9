"""RMSNorms that have no residual to join: one operator each."""

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ..program.building import replace_everything
from ..program.programs import Program, original_class
from ..program.rewrites import Match, Rewrite
from ..record import NOTHING, RECORD
from ..runtime import called
from .norms import NormFormula, is_norm, weight_of

ops = torch.ops.moe_mps


def _normed(formula: NormFormula, norm: nn.Module, x: Tensor) -> Tensor | None:
    """norm(x) by the operator; None where its result would differ from the module's."""
    if x.dtype is torch.float64:
        return None
    weight = None
    if formula.weight:
        weight = weight_of(norm)
        same = weight.device == x.device and (formula.keeps_dtype or weight.dtype is x.dtype)
        if not same or x.shape[-1] != weight.shape[0]:
            return None
    out: Tensor = ops.rms_norm(x, weight, getattr(norm, formula.eps), formula.offset)
    return out


@called
def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), where the calling forward has been rewritten."""
    formula: NormFormula | None = norm.__dict__.get(RECORD, NOTHING).formula
    out = None if formula is None or is_observed(norm) else _normed(formula, norm, x)
    return norm(x) if out is None else out


@called
def rms_norm_forward(norm: nn.Module, x: Tensor) -> Tensor:
    """The forward of a norm that has been rewritten itself."""
    formula: NormFormula | None = norm.__dict__.get(RECORD, NOTHING).formula
    out = None if formula is None else _normed(formula, norm, x)
    return original_class(norm).forward(norm, x) if out is None else out


def replace_rms_norm(program: Program) -> None:
    """Rewrites the forward of a norm."""
    if len(program.arguments.args) == 2 and is_norm(program.module):
        replace_everything(program, "rms_norm_forward")
        program.rewrites.append("rms_norm")


def _is_norm(match: Match) -> str | None:
    return f"rms_norm ({match.child('NORM')})" if is_norm(match.module("NORM")) else None


# Faster than a call of a module.
CALL_NORM = Rewrite("NORM(X)", "rms_norm(NORM, X)", where=_is_norm)
