"""Whole gates: a router that norms, multiplies and selects (Gemma 4), as one moe_gate.

Such a router also returns probabilities over all experts. Where the layer discards them, the layer calls
`gate` instead of the router; called by anyone else, the router is as it was.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import MAX_TOP_K
from ...experts import is_observed, may_be_fused
from ..program.formulas import Node, evaluate, is_number, result_of
from ..program.patterns import match
from ..program.programs import name_of, original_class
from ..program.reads import record, recording, rest_on
from ..program.rewrites import Match, Rewrite
from ..record import NOTHING, RECORD, record_of
from ..runtime import called
from .handover import experts_fed_by

ops = torch.ops.moe_mps

_IDS = "topk(softmax(L), K)[1]"
_WEIGHTS = "topk(softmax(L), K)[0] / sum(topk(softmax(L), K)[0]) * index(PER_EXPERT, topk(softmax(L), K)[1])"
_HIDDEN = "X * rsqrt(mean(square(X)) + EPS) * SCALE * ROOT"


@dataclass(frozen=True)
class GateFormula:
    """Attributes of: softmax top-k of linear(rms(x) * scale * root), renormalised, * per_expert_scale.

    `classes` are those of the modules that the formula was read from: an adapter put in later changes them.
    """

    linear: str
    scale: str
    root: str
    per_expert_scale: str
    top_k: str
    eps: str
    classes: tuple[type[nn.Module], ...]

    def holds_for(self, router: nn.Module) -> bool:
        """Whether the router's parts are the same, and nothing sees or changes what they do."""
        modules = list(router.modules())
        return _classes(modules) == self.classes and not is_observed(*modules)


def _classes(modules: Iterable[nn.Module]) -> tuple[type[nn.Module], ...]:
    return tuple(map(original_class, modules))


def gate_formula(router: nn.Module) -> GateFormula | None:
    """How a router computes a gate; a forward that is rewritten meanwhile rests on what this rests on."""
    with recording() as reads:
        formula = _read_gate(router)
    if formula is not None:
        rest_on(reads.values())
    return formula


def _read_gate(router: nn.Module) -> GateFormula | None:
    result = result_of(router)
    if result is None or result.op != "tuple" or len(result.args) != 3:
        return None
    selected = match(_IDS, result.args[2])
    bound = selected and match(_WEIGHTS, result.args[1], selected)
    logits = bound["L"].peel() if bound else None
    if logits is None or logits.op != "module" or len(logits.args) != 2:
        return None
    normed = match(_HIDDEN, logits.args[1], bound)
    linear = router.get_submodule(logits.path)
    record(linear, "bias")
    if normed is None or type(linear) is not nn.Linear or linear.bias is not None:
        return None
    return _paths(router, normed | {"LINEAR": Node("attr", (logits.args[0],))})


def _paths(router: nn.Module, bound: dict[str, Node]) -> GateFormula | None:
    names = ("LINEAR", "SCALE", "ROOT", "PER_EXPERT", "K", "EPS")
    nodes = [bound[name].peel() for name in names]
    scale, per_expert = (evaluate(bound[name].peel(), router) for name in ("SCALE", "PER_EXPERT"))
    numbers = all(is_number(bound[name], router) for name in ("ROOT", "K", "EPS"))
    tensors = (
        isinstance(scale, Tensor) and isinstance(per_expert, Tensor) and scale.dim() == per_expert.dim() == 1
    )
    is_input = bound["X"].peel().op == "opaque"
    if not (numbers and tensors and is_input and all(node.op == "attr" for node in nodes)):
        return None
    top_k = evaluate(bound["K"].peel(), router)
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        return None
    linear, scale, root, per_expert, k, eps = (node.path for node in nodes)
    return GateFormula(linear, scale, root, per_expert, k, eps, _classes(router.modules()))


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


@called
def gate(
    experts: nn.Module | None, router: nn.Module, hidden: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """router(hidden) without its first result, unless something listens to it.

    The ids come in int32 where `experts` alone reads them, and on our operators.
    """
    formula: GateFormula | None = router.__dict__.get(RECORD, NOTHING).formula
    if formula is None or hidden.dim() != 2 or not formula.holds_for(router):
        return router(hidden)
    scale, root, per_expert, top_k, eps = (
        _attribute(router, path)
        for path in (formula.scale, formula.root, formula.per_expert_scale, formula.top_k, formula.eps)
    )
    weight = _attribute(router, formula.linear).weight
    weights, ids = ops.moe_gate(hidden, weight, scale * root, per_expert, top_k, eps, False)
    raw = experts is not None and may_be_fused(experts)
    return None, weights, ids if raw else ids.long()


def _is_gate(match: Match) -> str | None:
    """Whether a router is a gate, and nothing reads the first of its results."""
    program, results = match.program, name_of(match.statements["RESULTS"])
    others = [f"{results}[{index}]" for index in (1, 2)]
    read = [s for s in program.statements if isinstance(s, ast.Assign) and ast.unparse(s.value) in others]
    formula = gate_formula(match.module("ROUTER")) if program.uses(results) == len(read) else None
    if formula is None:
        return None
    record_of(match.module("ROUTER")).formula = formula
    match.values["EXPERTS"] = experts_fed_by(program, results) or ast.Constant(None)
    return f"moe_gate ({match.child('ROUTER')})"


USE_GATE = Rewrite("RESULTS = ROUTER(X)", "RESULTS = gate(EXPERTS, ROUTER, X)", where=_is_gate)
