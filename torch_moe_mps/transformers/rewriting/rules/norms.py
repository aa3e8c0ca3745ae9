"""RMSNorms next to the residual stream: `residual + x -> norm` and `residual + norm(x)` as one operator."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ..program.building import helper, item, own_module, sum_of, unary_call
from ..program.formulas import Node, Reader, evaluate, is_number
from ..program.patterns import match
from ..program.programs import Program, Unsupported, name_of
from ..program.reads import Read, holds, recording
from ..program.straightening import straighten

ops = torch.ops.moe_mps

MARK = "_moe_mps_norm"
_RMS = "X * rsqrt(mean(square(X)) + EPS)"
# Formula of the norm's forward -> what is added to its weight.
_FORMULAS = {f"(W + 1.0) * ({_RMS})": 1.0, f"W * ({_RMS})": 0.0, _RMS: 0.0}


@dataclass(frozen=True)
class NormFormula:
    """rms(x) * (weight + offset); `keeps_dtype`: the result has the dtype of x, whatever the weight has.

    `weight` is empty for a norm without one.
    """

    weight: str
    eps: str
    offset: float
    keeps_dtype: bool
    reads: tuple[Read, ...] = ()


_found: ContextVar[dict[nn.Module, NormFormula | None] | None] = ContextVar("moe_mps_norms", default=None)


@contextmanager
def formulas_kept() -> Iterator[None]:
    """Within, each module is read once: several rules ask for it, and nothing changes."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def norm_formula(module: nn.Module) -> NormFormula | None:
    """How a module computes its RMSNorm, None if it is something else."""
    found = _found.get()
    if found is not None and module in found:
        return found[module]
    with recording() as reads:
        formula = _read_norm(module)
    formula = formula and replace(formula, reads=tuple(reads.values()))
    if found is not None:
        found[module] = formula
    return formula


def _read_norm(module: nn.Module) -> NormFormula | None:
    try:
        result = Reader(straighten(module)).result()
    except Unsupported:
        return None
    for formula, offset in _FORMULAS.items():
        bound = match(formula, result)
        if bound is None or bound["X"].peel().op != "opaque" or not is_number(bound["EPS"], module):
            continue
        if bound["EPS"].op != "attr" or not _has_weight(module, bound.get("W")):
            continue
        weight = "weight" if "W" in bound else ""
        return NormFormula(weight, bound["EPS"].args[0].removeprefix("self."), offset, result.op == "cast")
    return None


def _has_weight(module: nn.Module, weight: Node | None) -> bool:
    """Whether a factor of the formula is the module's `weight`, a vector. There may be none."""
    if weight is None:
        return True
    own = getattr(module, "weight", None)
    return isinstance(own, Tensor) and own.dim() == 1 and evaluate(weight.peel(), module) is own


def _fusable(norm: nn.Module, residual: Tensor, x: Tensor) -> NormFormula | None:
    """The formula if the operator gives what the module gives for these tensors, hooks included."""
    formula = norm.__dict__.get(MARK)
    if formula is None or not holds(norm, MARK) or is_observed(norm):
        return None
    if not (isinstance(residual, Tensor) and isinstance(x, Tensor)):
        return None
    weight = weight_of(norm)
    same = residual.dtype is x.dtype and residual.shape == x.shape and weight.device == x.device
    return formula if same and (formula.keeps_dtype or weight.dtype is x.dtype) else None


def weight_of(norm: nn.Module) -> Tensor:
    """norm.weight, which is slow to read as an attribute."""
    own = norm.__dict__
    weight: Any = own.get("weight")  # something written over the parameter
    if weight is None:
        weight = own["_parameters"].get("weight")
    if weight is None:
        weight = norm.weight
    return weight


def residual_norm(norm: nn.Module, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x)"""
    formula = _fusable(norm, residual, x)
    if formula is None:
        total = residual + x
        return norm(total), total
    eps = getattr(norm, formula.eps)
    return ops.fused_residual_norm(residual, x, weight_of(norm), eps, True, formula.offset)


def norm_add(norm: nn.Module, residual: Tensor, x: Tensor) -> Tensor:
    """residual + norm(x)"""
    formula = _fusable(norm, residual, x)
    if formula is None:
        return residual + norm(x)
    return ops.fused_norm_add(residual, x, weight_of(norm), getattr(norm, formula.eps), formula.offset)


def norm_add_scalar(norm: nn.Module, residual: Tensor, x: Tensor, scalar: Tensor) -> Tensor:
    """(residual + norm(x)) * scalar, in the dtype of the sum."""
    formula = _fusable(norm, residual, x)
    if formula is None:
        total = residual + norm(x)
        total *= scalar
        return total
    eps = getattr(norm, formula.eps)
    return ops.fused_norm_add_scalar(residual, x, weight_of(norm), scalar, eps, formula.offset)


# Rewriting of a layer's program


def fuse_norms(program: Program) -> None:
    """Rewrites each pair of a residual sum and an RMSNorm; notes in program.rewrites what it did."""
    norms = {name: norm_formula(child) for name, child in program.module.named_children()}
    formulas = {name: formula for name, formula in norms.items() if formula is not None and formula.weight}
    for fuse in (_fuse_norm_add, _fuse_residual_norm):
        for statement in list(program.statements):
            if isinstance(statement, ast.Assign):
                fuse(program, statement, formulas)


def _norm_call(
    program: Program, value: ast.expr, formulas: dict[str, NormFormula]
) -> tuple[str, ast.expr] | None:
    """(norm, x) of an expression self.norm(x)."""
    found = unary_call(program, value)
    return (found[0], found[2]) if found is not None and found[0] in formulas else None


def _mark(program: Program, norm: str, formula: NormFormula, note: str) -> None:
    getattr(program.module, norm).__dict__[MARK] = formula
    program.rewrites.append(f"{note} ({norm})")


def _fuse_norm_add(program: Program, statement: ast.Assign, formulas: dict[str, NormFormula]) -> None:
    """residual + self.norm(x), and the multiplication by the layer's scalar where it follows."""
    added = sum_of(statement)
    if added is None:
        return
    terms = (added.left, added.right)
    for residual, normed in (terms, terms[::-1]):
        found = program.definition(program.last_name(normed))
        if found is None:
            continue
        source, value = found
        call = _norm_call(program, value, formulas)
        if call is None or program.uses(name_of(source)) > 1 or program.mutates_between(source, statement):
            continue
        norm, x = call
        program.statements.remove(source)
        scaled = _scaled_by_attribute(program, name_of(statement))
        if scaled is None:
            statement.value = helper("norm_add", own_module(norm), residual, x)
            _mark(program, norm, formulas[norm], "fused_norm_add")
        else:
            product, scalar = scaled
            product.value = helper("norm_add_scalar", own_module(norm), residual, x, scalar)
            program.statements.remove(statement)
            _mark(program, norm, formulas[norm], "fused_norm_add_scalar")
        return


def _scaled_by_attribute(program: Program, total: str) -> tuple[ast.Assign, ast.expr] | None:
    """The statement `total *= self.scalar` with a tensor of one element, where nothing else reads the sum."""
    if program.uses(total) != 1:
        return None
    for statement in program.inplace:
        if not isinstance(statement, ast.Assign) or not isinstance(value := statement.value, ast.Call):
            continue
        if ast.unparse(value.func) != "_inplace.imul":
            continue
        target, factor = value.args
        name = ast.unparse(factor).removeprefix("self.")
        scalar = getattr(program.module, name, None) if name.isidentifier() else None
        if program.last_name(target) == total and isinstance(scalar, Tensor) and scalar.numel() == 1:
            return statement, factor
    return None


def _fuse_residual_norm(program: Program, statement: ast.Assign, formulas: dict[str, NormFormula]) -> None:
    """x = self.norm(s) with s = residual + y"""
    call = _norm_call(program, statement.value, formulas)
    if call is None:
        return
    norm, x = call
    found = program.definition(program.last_name(x))
    if found is None:
        return
    source, _ = found
    terms = sum_of(source)
    if terms is None or program.mutates_between(source, statement):
        return
    pair = program.assign("normed", helper("residual_norm", own_module(norm), terms.left, terms.right))
    program.statements.insert(program.statements.index(source), pair)
    for target, index in ((statement, 0), (source, 1)):
        target.value = item(name_of(pair), index)
    program.definitions[name_of(source)] = source.value
    _mark(program, norm, formulas[norm], "fused_residual_norm")
