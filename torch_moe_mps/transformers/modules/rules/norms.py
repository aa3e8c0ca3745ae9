"""Form of a module that is an RMSNorm, read from the trace of its forward."""

import functools
import warnings
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn

from ....ops._checks import first_line
from ...basics.state import NOTHING, STATE, state_of
from ...graphs.nodes import aten, is_call, tensor_of
from ...graphs.patterns import match, uncast
from ...graphs.tracing import VALUE
from ..traced import DTYPES, SIZES, Input, Sizes, Traced, everywhere, path_of, remembered, takes, trace

NormArguments: TypeAlias = tuple[Any, float, float]  # of a norm in an operator: weight, eps and offset

_MEANS = ("mean(pow(X, 2), [-1], True)", "mean(X * X, [-1], True)")
_ROOTS = ("Y * rsqrt({} + EPS)", "Y * pow({} + EPS, -0.5)", "Y / sqrt({} + EPS)")
# Formula of what a norm computes -> what is added to its weight.
_FORMULAS = {
    form.format(root.format(mean)): offset
    for form, offset in (("(W + 1.0) * ({})", 1.0), ("W * ({})", 0.0), ("{}", 0.0))
    for root in _ROOTS
    for mean in _MEANS
}
_MIXED = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))  # of the input and the weight
_WITHOUT_WEIGHT = 24  # the width that such a norm is traced with


class NormFormula(NamedTuple):
    """rms(x) * (weight + offset); `keeps_dtype`: the result has the dtype of x, whatever the weight has.

    `weight` is the name of a parameter, empty for a norm without one. `groups` of neighbouring columns are
    normed apart.
    """

    weight: str
    eps: float
    offset: float
    keeps_dtype: bool
    groups: int = 1


@remembered
def norm_formula(module: nn.Module) -> NormFormula | None:
    """How a module computes its RMSNorm, None if it is something else."""
    return _norm_traced(module, "{}", 1)


@remembered
def gated_norm_formula(module: nn.Module) -> NormFormula | None:
    """The same of a module whose second input is a gate: norm(x) * silu(gate)."""
    return _norm_traced(module, "({}) * silu(GATE)", 2)


def _norm_traced(module: nn.Module, form: str, inputs: int) -> NormFormula | None:
    """The norm in what a module computes, if it is the same for all shapes and dtypes of its inputs."""
    weights = [each for each in module._parameters.values() if each is not None]
    is_small = not module._modules and len(weights) < 2 and all(each.dim() == 1 for each in weights)
    if not is_small or not takes(module, inputs):
        return None
    width = weights[0].shape[0] if weights else _WITHOUT_WEIGHT

    def ask(sizes: Sizes, dtype: torch.dtype, weight: torch.dtype | None = None) -> NormFormula | None:
        traced = trace(module, *[Input((*sizes, width), dtype)] * inputs, weights=weight or dtype)
        return None if traced is None else _read_norm(traced, form)

    formula = everywhere(ask)
    if formula is None or not formula.keeps_dtype:
        return None
    mixed = [ask(SIZES[0], *dtypes) for dtypes in _MIXED]
    other = formula._replace(keeps_dtype=False)
    if not {formula, other}.issuperset(mixed):
        return None
    return formula if mixed == [formula] * len(mixed) else other


def _read_norm(traced: Traced, form: str) -> NormFormula | None:
    x, *gate = traced.inputs
    if not isinstance(traced.result, fx.Node) or not all(_is_of_rows(node, x) for node in traced.graph.nodes):
        return None
    for formula, offset in _FORMULAS.items():
        bound = match(form.format(formula), traced.result)
        read = [uncast(bound[name]) for name in ("X", "Y", "GATE") if name in bound] if bound else []
        if bound is None or read != [x, x, *gate]:  # X and Y may have other dtypes
            continue
        weight = path_of(bound["W"]) if "W" in bound else ""
        if weight is not None and isinstance(bound["EPS"], (int, float)):
            keeps_dtype = tensor_of(traced.result).dtype == tensor_of(x).dtype
            means = [tensor_of(node) for node in traced.graph.nodes if is_call(node, aten.mean)]
            groups = means[0].numel() // tensor_of(x).shape[:-1].numel()
            return NormFormula(weight, bound["EPS"], offset, keeps_dtype, groups)
    return None


def _is_of_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node has the rows of the input, or of its groups, one number for each, or what all share."""
    if node.op == "output":
        return True
    value, *rows, width = node.meta[VALUE], *tensor_of(x).shape
    if not isinstance(value, Tensor) or value.dtype not in DTYPES:
        return False
    *leading, last = value.shape or (0,)
    of_groups = leading[:-1] == rows and last in (1, width // max(1, leading[-1]))
    return [*value.shape] in ([*rows, width], [*rows, 1], [width]) or of_groups


def is_norm(module: nn.Module, weighted: bool | None = None, grouped: bool = False) -> bool:
    """Whether a module is an RMSNorm, with a weight, without (False) or either (None); `grouped`: or several.

    Its state has the formula from then on. A forward that is rewritten meanwhile rests on it.
    """
    formula = norm_formula(module)
    if (
        formula is None
        or (formula.groups > 1 and not grouped)
        or weighted not in (None, bool(formula.weight))
    ):
        return False
    state_of(module).formula = formula
    return True


def norm_arguments(norm: nn.Module, x: Tensor, groups: int = 1) -> NormArguments | None:
    """The weight, None without one, eps and weight_offset; None where only the module's own code norms x."""
    own = norm.__dict__
    formula: NormFormula | None = own.get(STATE, NOTHING).formula
    if formula is None or formula.groups != groups:
        return None
    weight: Any = None
    if formula.weight:
        weight = own["_parameters"].get(formula.weight)
        if weight is None or formula.weight in own:  # something written over the parameter
            weight = getattr(norm, formula.weight)
        if weight.numel() != x.shape[-1] or not (formula.keeps_dtype or weight.dtype is x.dtype):
            return None
    return weight, formula.eps, formula.offset


class _Usual(nn.Module):
    """A norm as most models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@functools.cache
def check_traces() -> None:
    """Warns, once, where traces show no formula: in another torch every module would keep its own code."""
    try:
        traced = trace(_Usual(), Input((*SIZES[0], 8)), raises=True)
        if traced is not None and _read_norm(traced, "{}") is not None:
            return
        nodes = () if traced is None else traced.graph.nodes
        reason = f"a norm gives [{', '.join(str(node.target) for node in nodes)}]"
    except Exception as error:  # of another torch, in any of its functions
        reason = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(
        f"torch_moe_mps: torch {torch.__version__} does not show what modules compute ({reason}); norms, "
        "MLPs and routers keep the model's own code",
        stacklevel=2,
    )
