"""A module's forward as a straight-line program that can be read, matched and rewritten.

Every value has a name of its own (static single assignment), so that a name stands for one definition.
`compile` turns the program into a function again: a rewrite replaces the values it knows and leaves every
other line of the model's code alone.
"""

import ast
import functools
import linecache
import operator
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import runtime

# Attribute of the subclasses that rewriting makes.
CLASS_MARK = "_moe_mps_original_class"


class Unsupported(Exception):
    """The forward cannot be turned into a straight-line program; the message says why."""


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before its forward was rewritten; a class that was put on top later stays."""
    return vars(type(module)).get(CLASS_MARK, type(module))


def name_of(statement: ast.Assign) -> str:
    """The name that an assignment of a program defines."""
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    return target.id


class Program:
    """Statements in order; `definitions` maps the names that they define to the values."""

    def __init__(self, module: nn.Module, function: types.FunctionType, arguments: ast.arguments):
        self.module = module
        self.function = function
        self.arguments = arguments
        self.statements: list[ast.stmt] = []
        self.definitions: dict[str, ast.expr] = {}
        self.inplace: list[ast.stmt] = []
        self.result: ast.expr = ast.Constant(None)
        self.rewrites: list[str] = []
        self.stems: dict[str, str] = {name: name for name in self.arguments_names()}
        self._fresh = 0

    def arguments_names(self) -> set[str]:
        a = self.arguments
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        return {argument.arg for argument in every if argument is not None}

    def fresh(self, stem: str) -> str:
        """A new name for a version of the variable `stem`."""
        self._fresh += 1
        name = f"{stem}_{self._fresh}"
        self.stems[name] = stem
        return name

    def assign(self, stem: str, value: ast.expr, code: ast.expr | None = None) -> ast.Assign:
        """A new name for `value`, which `code` computes (itself unless given)."""
        name = self.fresh(stem)
        self.definitions[name] = value
        return ast.Assign(targets=[ast.Name(name, ast.Store())], value=value if code is None else code)

    def defined_by(self, name: str) -> ast.Assign | None:
        """The statement that computes a name."""
        for statement in self.statements:
            if isinstance(statement, ast.Assign) and name_of(statement) == name:
                return statement
        return None

    def definition(self, name: str | None) -> tuple[ast.Assign, ast.expr] | None:
        """The statement that computes a name, and the value; None for a name that has no statement."""
        statement = None if name is None else self.defined_by(name)
        return None if name is None or statement is None else (statement, self.definitions[name])

    def uses(self, name: str) -> int:
        """How often a name is read."""
        return sum(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for tree in (*self.statements, self.result)
            for node in ast.walk(tree)
        )

    def follow(self, value: ast.expr) -> ast.expr:
        """The value behind names that only rename."""
        while isinstance(value, ast.Name) and value.id in self.definitions:
            value = self.definitions[value.id]
        return value

    def last_name(self, value: ast.expr) -> str | None:
        """The name that holds a value: the end of a chain of renamings."""
        name = None
        while isinstance(value, ast.Name) and value.id in self.definitions:
            name, value = value.id, self.definitions[value.id]
        return name

    def mutates_between(self, first: ast.stmt, last: ast.stmt) -> bool:
        """Whether something is changed in place between two statements: nothing may move there then."""
        between = self.statements[self.statements.index(first) : self.statements.index(last)]
        return any(statement in self.inplace for statement in between)

    def compile(self, is_pure: Callable[[ast.expr, nn.Module], bool]) -> types.FunctionType:
        """The function that runs the program, with the globals of the original."""
        self.drop_unused(is_pure)
        self._reuse_names()
        body = [*self.statements, ast.Return(self.result)]
        children = _ReadChildren(self.module)
        body = [children.visit(statement) for statement in body]
        # From Python 3.12 on the node has type_params, which may not be missing.
        options: dict[str, Any] = {"type_params": []}
        forward = ast.FunctionDef("forward", self.arguments, body, [], **options)
        return compile_forward(self.function, forward)

    def drop_unused(self, is_pure: Callable[[ast.expr, nn.Module], bool]) -> None:
        """Drops what nothing reads and what has no effect."""
        read = {n.id for n in ast.walk(self.result) if isinstance(n, ast.Name)}
        kept = []
        for statement in reversed(self.statements):
            if (
                isinstance(statement, ast.Assign)
                and name_of(statement) not in read
                and is_pure(statement.value, self.module)
            ):
                self.definitions.pop(name_of(statement), None)
                continue
            read |= {
                n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
            }
            kept.append(statement)
        self.statements = kept[::-1]

    def _reuse_names(self) -> None:
        """Versions of a variable share its name where their lives do not overlap: tensors are freed early."""
        first, last = self._lives()
        free = {name for name in last if name not in self.stems}  # globals, which a variable must not hide
        holders: dict[str, str] = {name: name for name in self.arguments_names()}
        renamed: dict[str, str] = {}
        for name in sorted(first, key=first.__getitem__):
            stem = self.stems[name]
            holder = holders.get(stem)
            if stem not in free and (holder is None or last.get(holder, -1) <= first[name]):
                renamed[name] = stem
                holders[stem] = name
        rename = RenameVariables(renamed)
        self.statements = [rename.visit(statement) for statement in self.statements]
        self.result = rename.visit(self.result)

    def _lives(self) -> tuple[dict[str, int], dict[str, int]]:
        """The positions at which names are first stored and last read."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for position, tree in enumerate([*self.statements, self.result]):
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    first.setdefault(node.id, position)
                elif isinstance(node, ast.Name):
                    last[node.id] = position
        return first, last


def copied(tree: Any) -> Any:
    """A copy of a syntax tree, several times as fast as copy.deepcopy."""
    if isinstance(tree, list):
        return [copied(each) for each in tree]
    if not isinstance(tree, ast.AST) or isinstance(tree, ast.expr_context):
        return tree
    new = tree.__class__.__new__(tree.__class__)
    new.__dict__.update({name: copied(value) for name, value in tree.__dict__.items()})
    return new


class RenameVariables(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


class _ReadChildren(ast.NodeTransformer):
    """self.child is read from the dictionaries that hold it: attributes of modules are slow.

    The instance's own dictionary comes first: something may be written there over a child.
    """

    def __init__(self, module: nn.Module):
        self.names = {name for name in module._modules if not hasattr(type(module), name)}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_child = node.attr in self.names and isinstance(node.ctx, ast.Load)
        if not is_child or not isinstance(node.value, ast.Name) or node.value.id != "self":
            return node
        places = (f"self.{own}.get({node.attr!r})" for own in ("__dict__", "_modules"))
        return ast.BoolOp(ast.Or(), [*(ast.parse(place, mode="eval").body for place in places), node])


def compile_forward(function: types.FunctionType, forward: ast.FunctionDef) -> types.FunctionType:
    """A rewritten `function` with its globals and `runtime` as `_moe_mps`; one object for one source."""
    build = ast.parse("def build(_moe_mps, _inplace):\n    return forward")
    (function_tree,) = build.body
    assert isinstance(function_tree, ast.FunctionDef)
    function_tree.body.insert(0, forward)
    return _compile(function, ast.unparse(ast.fix_missing_locations(build)))


@functools.lru_cache(maxsize=4096)
def _compile(function: types.FunctionType, source: str) -> types.FunctionType:
    name = f"<torch_moe_mps {function.__module__}.{function.__qualname__} {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict = {}
    exec(compile(source, name, "exec"), function.__globals__, scope)
    forward = scope["build"](runtime, operator)
    forward.__qualname__ = function.__qualname__
    forward.__module__ = function.__module__
    return forward
