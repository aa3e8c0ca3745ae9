"""Routers whose weights and ids go to the experts as the operator gives them, without casts in between."""

import ast
import copy

from torch import nn

from ..interface import is_experts
from ..program.programs import Program
from .router import is_replaceable


def hand_over_raw_results(program: Program) -> None:
    """Rewrites `logits, weights, ids = self.router(x)` where weights and ids only go to the experts."""
    for statement in list(program.statements):
        call = statement.value if isinstance(statement, ast.Assign) else None
        owner, _, name = (
            ast.unparse(call.func).rpartition(".") if isinstance(call, ast.Call) else ("", "", "")
        )
        router = getattr(program.module, name, None) if owner == "self" else None
        if not isinstance(router, nn.Module) or not is_replaceable(router):
            continue
        experts = experts_fed_by(program, statement.targets[0].id)
        if experts is not None:
            program.rewrites.append(f"results of {name} passed on without casts")
            function = ast.Attribute(ast.Name("_moe_mps", ast.Load()), "routed", ast.Load())
            statement.value = ast.Call(function, [experts, call.func, *call.args], call.keywords)


def experts_fed_by(program: Program, results: str) -> ast.expr | None:
    """The experts, as an expression, that take results[1] and results[2], if nothing else reads these."""
    consumer = _only_consumer(program, results)
    if consumer is None:
        return None
    return copy.deepcopy(consumer.args[0] if _is_with_shared(consumer) else consumer.func)


def _only_consumer(program: Program, results: str) -> ast.Call | None:
    """The call of the experts that reads results[1] and results[2], if nothing else does."""
    names = {}
    for name, value in program.definitions.items():
        for index in (1, 2):
            if ast.unparse(value) == f"{results}[{index}]":
                names[name] = index
    if sorted(names.values()) != [1, 2] or any(program.uses(name) != 1 for name in names):
        return None
    for tree in (*program.statements, program.result):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _is_experts_call(program, node):
                read = {argument.id for argument in node.args if isinstance(argument, ast.Name)}
                if names.keys() <= read:
                    return node
    return None


def _is_experts_call(program: Program, call: ast.Call) -> bool:
    owner, _, called = ast.unparse(call.func).rpartition(".")
    if _is_with_shared(call):
        return True
    return owner == "self" and is_experts(getattr(program.module, called, None)) and len(call.args) == 3


def _is_with_shared(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "_moe_mps.experts_with_shared"
