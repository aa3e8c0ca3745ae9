"""Residual sums behind experts and MLPs: the last operator of the block adds the residual."""

import ast
import copy
from typing import Any

from torch import Tensor, nn

from ...experts import is_observed
from ..program.building import add_option, helper, own_module, sums, unary_call
from ..program.programs import Program, name_of
from .mlp import RESIDUAL
from .shared import experts_call, is_with_shared


def with_residual(block: nn.Module, residual: Tensor, x: Tensor) -> Tensor | tuple:
    """block(x) with the residual added to its result, to the first one if there are several."""
    if RESIDUAL in vars(type(block)) and not is_observed(block) and residual.shape == x.shape:
        return block(x, **{RESIDUAL: residual})
    return add_to_first(residual, block(x))


def add_to_first(residual: Tensor | None, out: Tensor | tuple) -> Tensor | tuple:
    if residual is None:
        return out
    return (residual + out[0], *out[1:]) if isinstance(out, tuple) else residual + out


def first_of(out: Any) -> Any:
    """The first of several results."""
    if not isinstance(out, tuple):
        return out
    first, _ = out
    return first


def take_residual(program: Program) -> None:
    """Gives a block that returns the output of its experts an option: a residual that is added to it."""
    result = program.follow(program.result)
    first = result.elts[0] if isinstance(result, ast.Tuple) and result.elts else result
    call = experts_call(program, first, or_with_shared=True)
    if call is None or call.keywords:
        return
    arguments = call.args if is_with_shared(call) else [call.func, *call.args]
    new = helper("experts_with_shared", *arguments, residual=ast.Name(RESIDUAL, ast.Load()))
    call.func, call.args, call.keywords = new.func, new.args, new.keywords
    add_option(program, RESIDUAL)
    program.rewrites.append("residual in moe_experts")


def hand_over_residual(program: Program) -> None:
    """Rewrites `residual + self.mlp(x)` of a layer."""
    for statement, total in sums(program):
        if statement not in program.inplace:
            _hand_over(program, statement, total)


def _hand_over(program: Program, statement: ast.Assign, total: ast.BinOp) -> None:
    for residual, out in ((total.left, total.right), (total.right, total.left)):
        source = _block_call(program, out)
        found = unary_call(program, source.value) if source is not None else None
        if source is None or found is None or program.mutates_between(source, statement):
            continue
        name, block, x = found
        if RESIDUAL not in vars(type(block)) or not _is_known(program, residual, source):
            continue
        source.value = helper("with_residual", own_module(name), copy.deepcopy(residual), x)
        statement.value = out
        program.definitions[name_of(statement)] = out
        program.rewrites.append(f"residual in {name}")
        return


def _block_call(program: Program, out: ast.expr) -> ast.Assign | None:
    """The statement that calls a block whose result, or the first of several, nothing but the sum reads."""
    name = program.last_name(out)
    if name is None or program.uses(name) != 1:
        return None
    value = program.definitions[name]
    if ast.unparse(value).startswith("_moe_mps.first_of(") and isinstance(value, ast.Call):
        name = program.last_name(value.args[0])
        if name is None or program.uses(name) != 1:
            return None
        value = program.definitions[name]
    if isinstance(value, ast.Subscript) and ast.unparse(value.slice) == "0":
        items = program.last_name(value.value)
        others = (n for n, v in program.definitions.items() if n != name and _is_item(v, items))
        if items is None or any(map(program.uses, others)):
            return None
        name, value = items, program.definitions[items]
    source = program.defined_by(name)
    is_call = source is not None and source.value is value and unary_call(program, value) is not None
    return source if is_call else None


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
