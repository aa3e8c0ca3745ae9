"""RMSNorms that have no residual to join: one operator each."""

import ast

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ..program.building import calls, helper, own_module, replace, replace_everything, unary_call
from ..program.programs import Program, original_class
from ..program.reads import holds
from .norms import MARK, NormFormula, norm_formula, weight_of

ops = torch.ops.moe_mps


def _fits(formula: NormFormula, norm: nn.Module, x: Tensor) -> bool:
    """Whether the operator gives what the module gives for this input."""
    if x.dtype is torch.float64 or not holds(norm, MARK):
        return False
    weight = weight_of(norm) if formula.weight else None
    if weight is None:
        return True
    weight = weight_of(norm)
    same_device = weight.device == x.device
    return same_device and x.shape[-1] == weight.shape[0] and (formula.keeps_dtype or weight.dtype is x.dtype)


def _normed(formula: NormFormula, norm: nn.Module, x: Tensor) -> Tensor:
    weight = weight_of(norm) if formula.weight else None
    return ops.rms_norm(x, weight, getattr(norm, formula.eps), formula.offset)


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), where the calling forward has been rewritten."""
    formula = norm.__dict__.get(MARK)
    if formula is None or is_observed(norm) or not _fits(formula, norm, x):
        return norm(x)
    return _normed(formula, norm, x)


def rms_norm_forward(norm: nn.Module, x: Tensor) -> Tensor:
    """The forward of a norm that has been rewritten itself."""
    formula = norm.__dict__.get(MARK)
    if formula is None or not _fits(formula, norm, x):
        return original_class(norm).forward(norm, x)
    return _normed(formula, norm, x)


def replace_rms_norm(program: Program) -> bool:
    """Rewrites the forward of a norm."""
    formula = norm_formula(program.module)
    arguments = program.arguments.args
    if formula is None or len(arguments) != 2:
        return False
    program.module.__dict__[MARK] = formula
    x = ast.Name(arguments[1].arg, ast.Load())
    replace_everything(program, helper("rms_norm_forward", ast.Name("self", ast.Load()), x))
    program.rewrites.append("rms_norm")
    return True


def call_norms(program: Program) -> None:
    """Rewrites self.norm(x) as a call of the operator, which is faster than a call of a module."""
    for statement, call in list(calls(program)):
        found = unary_call(program, call)
        if found is None:
            continue
        name, norm, x = found
        formula = norm_formula(norm)
        if formula is not None:
            norm.__dict__[MARK] = formula
            replace(program, statement, call, helper("rms_norm", own_module(name), x))
            program.rewrites.append(f"rms_norm ({name})")
