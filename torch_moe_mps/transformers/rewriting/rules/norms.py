"""RMSNorms next to the residual stream: `residual + x -> norm` and `residual + norm(x)` as one operator."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ...report import Done
from ..program.formulas import Node, evaluate, is_argument, is_number, result_of
from ..program.patterns import match
from ..program.programs import Program
from ..program.rewrites import Form, Match, Rewrite
from ..reads import Read, recording, rest_on
from ..record import NOTHING, RECORD, record_of
from ..runtime import called

ops = torch.ops.moe_mps
NormArguments: TypeAlias = tuple[Any, float, float]  # of a norm in an operator: weight, eps and offset

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
    """Inside the block, each module is read once: several rules ask for it, and nothing changes."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def norm_formula(module: nn.Module) -> NormFormula | None:
    """How a module computes its RMSNorm, None if it is something else.

    A forward that is rewritten meanwhile rests on what the formula rests on.
    """
    found = _found.get()
    if found is not None and module in found:
        formula = found[module]
    else:
        formula, _ = norm_in_result(module)
    if found is not None:
        found[module] = formula
    if formula is not None:
        rest_on(formula.reads)
    return formula


def is_norm(module: nn.Module, weighted: bool | None = None) -> bool:
    """Whether a module is an RMSNorm, with a weight, without (False) or either (None).

    Its record has the formula from then on.
    """
    formula = norm_formula(module)
    if formula is None or weighted not in (None, bool(formula.weight)):
        return False
    record_of(module).formula = formula
    return True


def norm_in(
    program: Program,
    value: ast.expr,
    until: ast.stmt | None,
    forms: dict[str, str],
    weighted: bool | None = None,
) -> Match | None:
    """A norm of the value that a statement reads, by forms of it with what they norm: NORMED."""
    for text, normed in forms.items():
        for found in Form(text).find(program, value, until):
            if is_norm(found.module("NORM"), weighted):
                found.values["NORMED"] = found.fill(normed)
                return found
    return None


def norm_in_result(module: nn.Module, form: str = "{}") -> tuple[NormFormula | None, dict[str, Node]]:
    """The norm in a form of what a module computes, None without one; and what the form's names stand for."""
    with recording() as reads:
        formula, bound = _read_norm(module, form)
    if formula is not None:  # its weight and eps are read in every call
        own = (formula.weight, formula.eps)
        formula = replace(formula, reads=tuple(r for r in reads.values() if r.path not in own))
    return formula, bound


def _read_norm(module: nn.Module, form: str) -> tuple[NormFormula | None, dict[str, Node]]:
    result = result_of(module)
    if result is None:
        return None, {}
    for formula, offset in _FORMULAS.items():
        bound = match(form.format(f"({formula})"), result)
        if bound is None or not is_argument(bound["X"].peel()) or not is_number(bound["EPS"], module):
            continue
        if bound["EPS"].op != "attr" or not _has_weight(module, bound.get("W")):
            continue
        weight = "weight" if "W" in bound else ""
        return NormFormula(weight, bound["EPS"].path, offset, result.op == "cast"), bound
    return None, {}


def _has_weight(module: nn.Module, weight: Node | None) -> bool:
    """Whether a factor of the formula is the module's `weight`, a vector. There may be none."""
    if weight is None:
        return True
    own = getattr(module, "weight", None)
    return isinstance(own, Tensor) and own.dim() == 1 and evaluate(weight.peel(), module) is own


def _arguments(norm: nn.Module, residual: Tensor, x: Tensor) -> NormArguments | None:
    """The norm's weight, eps and weight_offset; None where the module, its hooks included, has to run."""
    if is_observed(norm) or not (isinstance(residual, Tensor) and isinstance(x, Tensor)):
        return None
    return norm_arguments(norm, x) if residual.dtype is x.dtype and residual.shape == x.shape else None


def norm_arguments(norm: nn.Module, x: Tensor) -> NormArguments | None:
    """The weight, None without one, eps and weight_offset; None where only the module's own code norms x."""
    own = norm.__dict__
    formula: NormFormula | None = own.get(RECORD, NOTHING).formula
    if formula is None:
        return None
    weight: Any = None
    if formula.weight:
        weight = own["_parameters"].get("weight")
        if weight is None or "weight" in own:  # something written over the parameter
            weight = norm.weight
        if weight.numel() != x.shape[-1] or not (formula.keeps_dtype or weight.dtype is x.dtype):
            return None
    return weight, getattr(norm, formula.eps), formula.offset


@called
def residual_norm(norm: nn.Module, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x)"""
    arguments = _arguments(norm, residual, x)
    if arguments is None:
        total = residual + x
        return norm(total), total
    weight, eps, offset = arguments
    return ops.fused_residual_norm(residual, x, weight, eps, True, offset)


@called
def norm_add(norm: nn.Module, residual: Tensor, x: Tensor) -> Tensor:
    """residual + norm(x)"""
    arguments = _arguments(norm, residual, x)
    return residual + norm(x) if arguments is None else ops.fused_norm_add(residual, x, *arguments)


@called
def norm_add_scalar(norm: nn.Module, residual: Tensor, x: Tensor, scalar: Tensor) -> Tensor:
    """(residual + norm(x)) * scalar, in the dtype of the sum."""
    arguments = _arguments(norm, residual, x)
    if arguments is None:
        total = residual + norm(x)
        total *= scalar
        return total
    weight, eps, offset = arguments
    return ops.fused_norm_add_scalar(residual, x, weight, scalar, eps, offset)


def _fused(operator: str) -> Callable[[Match], Done | None]:
    """Lets NORM be replaced if it is an RMSNorm with a weight."""

    def where(match: Match) -> Done | None:
        found = is_norm(match.module("NORM"), weighted=True)
        return Done(operator, f"{operator} ({match.child('NORM')})") if found else None

    return where


def _scaled(match: Match) -> Done | None:
    """The same, if SCALAR is an attribute with one element."""
    name = match.child("SCALAR")
    scalar = getattr(match.program.module, name, None) if name.isidentifier() else None
    is_scalar = isinstance(scalar, Tensor) and scalar.numel() == 1
    return _fused("fused_norm_add_scalar")(match) if is_scalar else None


ADD_NORMS = (
    Rewrite("S = R + NORM(X); T = imul(S, SCALAR)", "T = norm_add_scalar(NORM, R, X, SCALAR)", where=_scaled),
    Rewrite("S = R + NORM(X)", "S = norm_add(NORM, R, X)", where=_fused("fused_norm_add")),
)
NORM_SUMS = Rewrite(
    "S = R + Y; N = NORM(S)", "N, S = residual_norm(NORM, R, Y)", where=_fused("fused_residual_norm")
)
