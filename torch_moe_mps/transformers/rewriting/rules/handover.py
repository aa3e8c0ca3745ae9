"""Routers whose weights and ids go to the experts as the operator gives them, without casts in between."""

import ast

from ...report import Done
from ..experts_calls import is_experts_call
from ..program.building import code, every_call
from ..program.programs import Program, copied, name_of
from ..program.rewrites import Match, Rewrite
from .options import GATE, RAW, RESIDUAL, takes


def _feeds_experts(match: Match) -> Done | None:
    """Whether weights and ids only go to the experts.

    A block may return weights beside its result. A layer that hands over its residual does not read them.
    """
    program, results = match.program, name_of(match.statements["RESULTS"])
    unseen = "True"
    experts = experts_fed_by(program, results)
    if experts is None and RESIDUAL in program.arguments_names():
        experts = experts_fed_by(program, results, or_returned=True)
        unseen = f"{RESIDUAL} is not None"
    router = match.module("ROUTER")
    is_gate = takes(router, GATE) and program.uses(results) == 2
    if experts is None or not (is_gate or takes(router, RAW)):
        return None
    match.values["EXPERTS"], match.values["UNSEEN"] = experts, code(unseen)
    return Done(None, f"results of {match.child('ROUTER')} passed on without casts")


HAND_OVER_RAW_RESULTS = Rewrite(
    "RESULTS = ROUTER(X, *REST, **OPTIONS)",
    "RESULTS = routed(EXPERTS, UNSEEN, ROUTER, X, *REST, **OPTIONS)",
    where=_feeds_experts,
)


def experts_fed_by(program: Program, results: str, or_returned: bool = False) -> ast.expr | None:
    """The experts, as an expression, that take results[1] and results[2], if nothing else reads these.

    `or_returned`: the block may return them, too, behind its first result.
    """
    items = [f"{results}[1]", f"{results}[2]"]
    found = {name: text for name, v in program.definitions.items() if (text := ast.unparse(v)) in items}
    others = program.result.elts[1:] if or_returned and isinstance(program.result, ast.Tuple) else []
    returned = [each.id for each in others if isinstance(each, ast.Name)]
    if sorted(found.values()) != items or any(program.uses(n) - returned.count(n) != 1 for n in found):
        return None
    for call in every_call(program):
        is_ours = ast.unparse(call.func) == "_moe_mps.experts_with_shared"
        read = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
        if found.keys() <= read and (is_ours or is_experts_call(program, call)):
            return copied(call.args[0] if is_ours else call.func)
    return None
