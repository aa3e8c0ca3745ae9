"""Builds pieces of programs: what rules put in the place of a model's code."""

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from .programs import Program, calls_in, copied, name_of

RESHAPING = {"view", "reshape"}  # what only gives a value another shape
SHAPED = "shaped"  # stands for the calls of view and reshape around a value, the innermost first


def code(text: str | ast.expr, **values: Any) -> Any:
    """An expression, as text or as a tree, with values for its names.

    Functions without a dot are those of `runtime`; `*NAME` and `**NAME` stand for lists of arguments and
    keywords.
    """
    tree = ast.parse(text, mode="eval").body if isinstance(text, str) else copied(text)
    return _Fill(values).visit(tree)


class _Fill(ast.NodeTransformer):
    def __init__(self, values: dict[str, Any]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value: ast.expr = self.values.get(node.id, node)
        return value

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == SHAPED:
            value = self.visit(node.args[0])
            for step in self.values[SHAPED]:
                value = ast.Call(ast.Attribute(value, step.func.attr, ast.Load()), step.args, step.keywords)
            return value
        if isinstance(node.func, ast.Name) and node.func.id not in self.values:
            node.func = ast.Attribute(ast.Name("_moe_mps", ast.Load()), node.func.id, ast.Load())
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        value = self.visit(node.value)
        return value if isinstance(value, list) else ast.Starred(value, ast.Load())

    def visit_keyword(self, node: ast.keyword) -> Any:
        value = self.visit(node.value)
        return value if isinstance(value, list) else ast.keyword(node.arg, value)


def child_of_call(program: Program, value: ast.AST) -> tuple[str, nn.Module] | None:
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


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def replace_in(program: Program, statement: ast.Assign | ast.Expr, old: ast.expr, new: ast.expr) -> None:
    """Puts `new` where `old` stands in the value of a statement."""
    statement.value = _Replace(old, new).visit(statement.value)
    if isinstance(statement, ast.Assign) and name_of(statement) in program.definitions:
        program.definitions[name_of(statement)] = statement.value


def replace_everything(program: Program, text: str) -> None:
    """The program only returns an expression of the forward's arguments, of which X is the first."""
    program.statements.clear()
    program.inplace.clear()
    program.result = code(text, X=ast.Name(program.arguments.args[1].arg, ast.Load()))
