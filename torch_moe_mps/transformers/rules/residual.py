"""Residual sums behind experts and MLPs: the last operator of the block adds the residual."""

import ast
import copy

from torch import Tensor, nn

from ..experts import is_observed
from ..interface import is_experts
from ..program.building import add_option, child_of_call, helper
from ..program.programs import Program
from .mlp import RESIDUAL

_VIEWS = {"view", "reshape"}


def with_residual(block: nn.Module, residual: Tensor, x: Tensor) -> Tensor | tuple:
    """block(x) with the residual added to its result, to the first one if there are several."""
    if RESIDUAL in vars(type(block)) and not is_observed(block) and residual.shape == x.shape:
        return block(x, **{RESIDUAL: residual})
    return add_to_first(residual, block(x))


def add_to_first(residual: Tensor | None, out: Tensor | tuple) -> Tensor | tuple:
    if residual is None:
        return out
    return (residual + out[0], *out[1:]) if isinstance(out, tuple) else residual + out


def take_residual(program: Program) -> None:
    """Gives a block whose result is that of its experts the option to add a residual to it."""
    result = program.follow(program.result)
    first = result.elts[0] if isinstance(result, ast.Tuple) and result.elts else result
    call = _call_of_experts(program, first)
    if call is None:
        return
    if ast.unparse(call.func) == "_moe_mps.experts_with_shared":
        arguments = call.args
    else:
        arguments = [call.func, *call.args]
    call.func = helper("experts_with_shared").func
    call.args = arguments
    call.keywords = [*call.keywords, ast.keyword("residual", ast.Name(RESIDUAL, ast.Load()))]
    add_option(program, RESIDUAL)
    program.rewrites.append("residual in moe_experts")


def _call_of_experts(program: Program, value: ast.expr) -> ast.Call | None:
    """The call of the experts behind a value and changes of its shape, if nothing else reads it."""
    while True:
        name = program.last_name(value)
        if name is not None and program.uses(name) != 1:
            return None
        value = program.follow(value)
        if not isinstance(value, ast.Call):
            return None
        if ast.unparse(value.func) == "_moe_mps.experts_with_shared":
            return value
        found = child_of_call(program, value)
        if found is not None:
            plain = is_experts(found[1]) and len(value.args) == 3 and not value.keywords
            return value if plain else None
        if not isinstance(value.func, ast.Attribute) or value.func.attr not in _VIEWS:
            return None
        value = value.func.value


def hand_over_residual(program: Program) -> None:
    """Rewrites `residual + self.mlp(x)` of a layer."""
    for statement in list(program.statements):
        value = statement.value if isinstance(statement, ast.Assign) else None
        if (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Add)
            and statement not in program.inplace
        ):
            _hand_over(program, statement, value)
    if isinstance(program.result, ast.BinOp) and isinstance(program.result.op, ast.Add):
        statement = program.assign("total", program.result)
        program.statements.append(statement)
        program.result = ast.Name(statement.targets[0].id, ast.Load())
        _hand_over(program, statement, statement.value)


def _is_sum(value: ast.expr | None) -> bool:
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)


def _hand_over(program: Program, statement: ast.Assign, total: ast.BinOp) -> None:
    for residual, out in ((total.left, total.right), (total.right, total.left)):
        source = _block_call(program, out)
        if source is None or program.mutates_between(source, statement):
            continue
        name, block = child_of_call(program, source.value)
        if RESIDUAL not in vars(type(block)) or not _is_known(program, residual, source):
            continue
        source.value = helper(
            "with_residual", source.value.func, copy.deepcopy(residual), source.value.args[0]
        )
        statement.value = out
        program.definitions[statement.targets[0].id] = out
        program.rewrites.append(f"residual in {name}")
        return


def _block_call(program: Program, out: ast.expr) -> ast.Assign | None:
    """The statement that calls a block whose result, or the first of several, nothing but the sum reads."""
    name = program.last_name(out)
    if name is None or program.uses(name) != 1:
        return None
    source, value = program.defined_by(name), program.definitions[name]
    if isinstance(value, ast.Subscript) and ast.unparse(value.slice) == "0":
        items = program.last_name(value.value)
        others = (n for n, v in program.definitions.items() if n != name and _is_item(v, items))
        if any(map(program.uses, others)):
            return None
        source = program.defined_by(items) if items else None
        value = program.definitions.get(items)
    found = child_of_call(program, value) if source is not None else None
    plain = found is not None and len(value.args) == 1 and not value.keywords
    return source if plain and source.value is value else None


def _is_item(value: ast.expr, of: str | None) -> bool:
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id == of


def _is_known(program: Program, residual: ast.expr, before: ast.Assign) -> bool:
    """Whether the residual is computed in front of the block."""
    if not isinstance(residual, ast.Name):
        return False
    statement = program.defined_by(residual.id)
    if statement is None:
        return residual.id in program.arguments_names()
    return program.statements.index(statement) < program.statements.index(before)
