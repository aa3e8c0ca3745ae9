"""Whole gates: a router that norms, multiplies and selects (Gemma 4), as one moe_gate.

Such a router also returns probabilities over all experts. A layer that discards them asks for the rest alone;
called by anyone else, the router computes what it did.
"""

import ast
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import MAX_TOP_K
from ...experts import is_observed, may_be_fused
from ..program.building import add_option, helper, own_module
from ..program.formulas import Node, Reader, evaluate, is_argument, is_number
from ..program.patterns import match
from ..program.programs import Program, Unsupported, name_of
from ..program.reads import record
from ..program.rewrites import Match, Rewrite
from ..program.straightening import straighten
from ..runtime import called
from .handover import experts_fed_by
from .options import GATE, forward_of

_IDS = "topk(softmax(L), K)[1]"
_WEIGHTS = "topk(softmax(L), K)[0] / sum(topk(softmax(L), K)[0]) * index(PER_EXPERT, topk(softmax(L), K)[1])"
_LOGITS = "LINEAR(X * rsqrt(mean(square(X)) + EPS) * SCALE * ROOT)"


def _formula(program: Program) -> dict[str, Node] | None:
    """softmax top-k of LINEAR(rms(X) * SCALE * ROOT), renormalised, * PER_EXPERT."""
    module, result = program.module, Reader(program).result()
    if result.op != "tuple" or len(result.args) != 3:
        return None
    bound = match(_IDS, result.args[2])
    bound = bound and match(_WEIGHTS, result.args[1], bound)
    bound = bound and match(_LOGITS, bound["L"], bound)
    if not bound or not is_argument(bound["X"].peel()):
        return None
    path = bound["LINEAR"].path
    linear = module.get_submodule(path)
    for attribute in (path, f"{path}.__class__", f"{path}.bias"):
        record(module, attribute)
    vectors = [evaluate(bound[name].peel(), module) for name in ("SCALE", "PER_EXPERT")]
    top_k = evaluate(bound["K"].peel(), module)
    fits = (
        type(linear) is nn.Linear
        and linear.bias is None
        and all(isinstance(vector, Tensor) and vector.dim() == 1 for vector in vectors)
        and all(is_number(bound[name], module) for name in ("ROOT", "EPS"))
        and isinstance(top_k, int)
        and 1 <= top_k <= MAX_TOP_K
    )
    return bound if fits else None


def offer_gate(program: Program) -> None:
    """Gives the forward of a gate an option with which it returns None for the probabilities."""
    bound = _formula(program)
    if bound is None:
        return
    sources = [bound[name].peel().source for name in ("X", "SCALE", "ROOT", "PER_EXPERT", "K", "EPS")]
    x, scale, root, per_expert, top_k, eps = (source for source in sources if source is not None)
    weight = ast.Attribute(own_module(bound["LINEAR"].path), "weight", ast.Load())
    scales = ast.BinOp(scale, ast.Mult(), root)
    call = helper("moe_gate", x, weight, scales, per_expert, top_k, eps)
    early = ast.Return(ast.Tuple([ast.Constant(None), ast.Starred(call, ast.Load())], ast.Load()))
    add_option(program, GATE, False)
    program.statements.insert(0, ast.If(ast.Name(GATE, ast.Load()), [early], []))
    program.rewrites.append("moe_gate, called by the layer")


@called
def moe_gate(*arguments: Any) -> tuple[Tensor, Tensor]:
    weights, ids = torch.ops.moe_mps.moe_gate(*arguments, renormalize_after_scale=False)
    return weights, ids


@called
def gate(
    experts: nn.Module | None, router: nn.Module, hidden: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """router(hidden) without its first result, unless something listens to it.

    The ids come in int32 where `experts` alone reads them, and on our operators.
    """
    forward, options = forward_of(router)
    if forward is None or GATE not in options or hidden.dim() != 2 or is_observed(*router.modules()):
        return router(hidden)
    _, weights, ids = forward(router, hidden, **{GATE: True})
    raw = experts is not None and may_be_fused(experts)
    return None, weights, ids if raw else ids.long()


def _is_gate(match: Match) -> str | None:
    """Whether a router is a gate, and nothing reads the first of its results."""
    program, results = match.program, name_of(match.statements["RESULTS"])
    others = [f"{results}[{index}]" for index in (1, 2)]
    read = [s for s in program.statements if isinstance(s, ast.Assign) and ast.unparse(s.value) in others]
    if program.uses(results) != len(read):
        return None
    try:
        formula = _formula(straighten(match.module("ROUTER")))
    except Unsupported:
        return None
    if formula is None:
        return None
    match.values["EXPERTS"] = experts_fed_by(program, results) or ast.Constant(None)
    return f"moe_gate ({match.child('ROUTER')})"


USE_GATE = Rewrite("RESULTS = ROUTER(X)", "RESULTS = gate(EXPERTS, ROUTER, X)", where=_is_gate)
