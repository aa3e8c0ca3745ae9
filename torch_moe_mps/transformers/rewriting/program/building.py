"""Pieces of programs: what rules put in the place of a model's code."""

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from .programs import Program, calls_in, name_of


def helper(name: str, *arguments: ast.expr, **keywords: ast.expr) -> ast.Call:
    """A call of one of the functions that rewritten programs know as `_moe_mps`."""
    function = ast.Attribute(ast.Name("_moe_mps", ast.Load()), name, ast.Load())
    return ast.Call(function, list(arguments), [ast.keyword(k, v) for k, v in keywords.items()])


def own_module(name: str) -> ast.Attribute:
    """self.name"""
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def item(name: str, index: int) -> ast.Subscript:
    return ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(index), ast.Load())


def child_of_call(program: Program, value: ast.expr) -> tuple[str, nn.Module] | None:
    """(name, module) if a value is a call of one of the module's children."""
    if not isinstance(value, ast.Call):
        return None
    owner, _, name = ast.unparse(value.func).rpartition(".")
    child = program.module._modules.get(name) if owner == "self" else None
    return None if child is None else (name, child)


def calls(program: Program) -> Iterator[tuple[ast.Assign, ast.Call]]:
    """Every call in the values that the program gives names, with its statement, in order."""
    for statement in program.assignments():
        if statement not in program.inplace:
            yield from ((statement, call) for call in calls_in(statement.value))


def every_call(program: Program) -> Iterator[ast.Call]:
    """All calls in the statements and the result."""
    for tree in (*program.statements, program.result):
        yield from calls_in(tree)


def first_result(program: Program) -> ast.expr:
    """What the program returns, the first of it if that is several values."""
    result = program.follow(program.result)
    return result.elts[0] if isinstance(result, ast.Tuple) and result.elts else program.result


def set_first_result(program: Program, value: ast.expr) -> None:
    result = program.follow(program.result)
    if isinstance(result, ast.Tuple):
        result.elts[0] = value
    else:
        program.result = value


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def replace_in(program: Program, statement: ast.Assign, old: ast.expr, new: ast.expr) -> None:
    """Puts `new` where `old` stands in the value of a statement."""
    statement.value = _Replace(old, new).visit(statement.value)
    if name_of(statement) in program.definitions:
        program.definitions[name_of(statement)] = statement.value


def replace_everything(program: Program, function: str, *options: ast.expr) -> None:
    """The program calls a function with the module, the forward's argument and options, nothing else."""
    x = ast.Name(program.arguments.args[1].arg, ast.Load())
    program.statements.clear()
    program.inplace.clear()
    program.result = helper(function, ast.Name("self", ast.Load()), x, *options)


def add_option(program: Program, name: str, default: bool | None = None) -> None:
    """A keyword argument of the rewritten forward."""
    program.arguments.kwonlyargs.append(ast.arg(name))
    program.arguments.kw_defaults.append(ast.Constant(default))
