"""Whole gates: a router that norms, multiplies and selects (Gemma 4), as one moe_gate.

Such a router also returns probabilities over all experts. A layer that discards them, and hands the rest to
the experts, asks for results without casts; called by anyone else, the router computes what it always did.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import MAX_TOP_K
from ...experts import is_observed
from ...report import Done
from ..program.building import add_option, code, return_early
from ..program.formulas import Node, Reader, evaluate, is_argument, is_number
from ..program.patterns import match
from ..program.programs import Program
from ..program.reads import record
from ..runtime import called
from .options import GATE

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
    """Lets the forward of a gate return None, weights and ids, as moe_gate gives them."""
    bound = _formula(program)
    if bound is None:
        return
    linear, sources = bound["LINEAR"].path, {name: node.peel().source for name, node in bound.items()}
    add_option(program, GATE, False)
    return_early(
        program,
        program.statements[0],
        code(f"{GATE} and is_gate(self, X)", **sources),
        code(f"(None, *moe_gate(X, self.{linear}.weight, SCALE * ROOT, PER_EXPERT, K, EPS))", **sources),
    )
    program.rewrites.append(Done("moe_gate", "moe_gate, called by the layer"))


@called
def is_gate(router: nn.Module, hidden: Tensor) -> bool:
    """Whether no module of the gate has a hook, and rows are its input."""
    return hidden.dim() == 2 and not is_observed(*router.modules())


@called
def moe_gate(*arguments: Any) -> tuple[Tensor, Tensor]:
    weights, ids = torch.ops.moe_mps.moe_gate(*arguments, renormalize_after_scale=False)
    return weights, ids
