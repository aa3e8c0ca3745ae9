"""Routers whose weights and ids go to the experts as the operator gives them, without casts in between."""

import ast
import copy

from ..experts_calls import is_experts_call
from ..program.building import child_of_call, helper
from ..program.programs import Program, name_of
from .mlp import RESIDUAL
from .router import is_replaceable
from .shared import is_with_shared


def hand_over_raw_results(program: Program) -> None:
    """Rewrites `logits, weights, ids = self.router(x)` where weights and ids only go to the experts.

    A block may return weights beside its result. A layer that hands over its residual does not read them.
    """
    for statement in list(program.statements):
        if not isinstance(statement, ast.Assign) or not isinstance(call := statement.value, ast.Call):
            continue
        found = child_of_call(program, call)
        if found is None:
            continue
        name, results = found[0], name_of(statement)
        condition: ast.expr = ast.Constant(True)
        experts = experts_fed_by(program, results)
        if experts is None and RESIDUAL in program.arguments_names():
            experts = experts_fed_by(program, results, or_returned=True)
            condition = ast.parse(f"{RESIDUAL} is not None", mode="eval").body
        if experts is not None and is_replaceable(found[1]):
            program.rewrites.append(f"results of {name} passed on without casts")
            routed = helper("routed", experts, condition, call.func, *call.args)
            routed.keywords = call.keywords
            statement.value = routed


def experts_fed_by(program: Program, results: str, or_returned: bool = False) -> ast.expr | None:
    """The experts, as an expression, that take results[1] and results[2], if nothing else reads these.

    `or_returned`: the block may return them, too, behind its first result.
    """
    consumer = _only_consumer(program, results, or_returned)
    if consumer is None:
        return None
    return copy.deepcopy(consumer.args[0] if is_with_shared(consumer) else consumer.func)


def _only_consumer(program: Program, results: str, or_returned: bool) -> ast.Call | None:
    """The call of the experts that reads results[1] and results[2], if nothing else does."""
    names = {}
    for name, value in program.definitions.items():
        for index in (1, 2):
            if ast.unparse(value) == f"{results}[{index}]":
                names[name] = index
    returned = [e.id for e in _returned(program)[1:] if isinstance(e, ast.Name)] if or_returned else []
    if sorted(names.values()) != [1, 2] or any(program.uses(n) - returned.count(n) != 1 for n in names):
        return None
    for tree in (*program.statements, program.result):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (is_with_shared(node) or is_experts_call(program, node)):
                read = {argument.id for argument in node.args if isinstance(argument, ast.Name)}
                if names.keys() <= read:
                    return node
    return None


def _returned(program: Program) -> list[ast.expr]:
    """What a block returns, one or several values."""
    return program.result.elts if isinstance(program.result, ast.Tuple) else [program.result]
