"""A module's forward as a program that can be read, matched and rewritten.

Every value has a name of its own (static single assignment), so that a name stands for one definition. An
`if` that only the arguments decide has two blocks; a variable that they assign gets one more name at the end
of both, which has no definition. `compile` turns the program into a function again: a rewrite replaces the
values it knows and leaves every other line of the model's code alone.
"""

import ast
import functools
import linecache
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import nn

from ...report import Done
from ...source import calls_in as calls_in
from ...source import names_in as names_in
from ...source import syntax_of as syntax_of
from .. import runtime
from ..record import Unsupported as Unsupported

# Names in rewritten forwards for the dictionaries of a module.
_LOCALS = {"__dict__": "_moe_mps_own", "_modules": "_moe_mps_modules", "_parameters": "_moe_mps_parameters"}

Block: TypeAlias = list[ast.stmt]
IsPure: TypeAlias = Callable[[ast.expr, nn.Module], bool]


class If(ast.If):
    """An `if` whose branches are blocks of the program; every other one is kept as it is."""


def name_of(statement: ast.Assign) -> str:
    """The name that an assignment of a program defines."""
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    return target.id


def arguments_in(a: ast.arguments) -> list[ast.arg]:
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return [argument for argument in every if argument is not None]


class Program:
    """A block of statements in order; `definitions` maps the names that they define to the values."""

    def __init__(self, module: nn.Module, function: types.FunctionType, arguments: ast.arguments):
        self.module = module
        self.function = function
        self.arguments = arguments
        self.statements: Block = []
        self.definitions: dict[str, ast.expr] = {}
        self.inplace: list[ast.stmt] = []
        self.result: ast.expr = ast.Constant(None)
        self.rewrites: list[Done] = []
        self._variables: set[str] = set()  # all names but those of arguments
        self._fresh = 0

    def arguments_names(self) -> set[str]:
        return {each.arg for each in arguments_in(self.arguments)}

    def fresh(self, stem: str) -> str:
        """A new name for a version of the variable `stem`."""
        self._fresh += 1
        name = f"{stem}_{self._fresh}"
        self._variables.add(name)
        return name

    def assign(self, stem: str, value: ast.expr, code: ast.expr | None = None) -> ast.Assign:
        """A new name for `value`, which `code` computes (itself unless given)."""
        name = self.fresh(stem)
        self.definitions[name] = value
        return ast.Assign(targets=[ast.Name(name, ast.Store())], value=value if code is None else code)

    def unpack(self, value: ast.expr, statements: list[ast.Assign]) -> ast.Assign:
        """The statement that computes the values of several others: its result has one for each."""
        every = self.assign("items", value)
        name = name_of(every)
        for index, statement in enumerate(statements):
            self.replace(
                statement, ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(index), ast.Load())
            )
        return every

    # Statements

    def blocks(self) -> Iterator[Block]:
        """The program's block, and those of the `if`s in it."""
        pending = [self.statements]
        for block in pending:
            yield block
            for statement in block:
                if isinstance(statement, If):
                    pending += [statement.body, statement.orelse]

    def every(self) -> Iterator[ast.stmt]:
        """All statements in order, those of an `if` after it."""
        pending = self.statements[::-1]
        while pending:
            statement = pending.pop()
            yield statement
            if isinstance(statement, If):
                pending += [*statement.orelse[::-1], *statement.body[::-1]]

    def assignments(self) -> list[ast.Assign]:
        """The statements that give one name a value."""
        every = (statement for statement in self.every() if isinstance(statement, ast.Assign))
        return [statement for statement in every if isinstance(statement.targets[0], ast.Name)]

    def block_of(self, statement: ast.stmt) -> Block:
        return next(block for block in self.blocks() if statement in block)

    def insert(self, before: ast.stmt, statement: ast.stmt) -> None:
        block = self.block_of(before)
        block.insert(block.index(before), statement)

    def remove(self, statement: ast.Assign) -> None:
        self.block_of(statement).remove(statement)
        del self.definitions[name_of(statement)]

    def replace(self, statement: ast.Assign, value: ast.expr) -> None:
        """Gives a name another value."""
        statement.value = self.definitions[name_of(statement)] = value

    def mutates_between(self, first: ast.stmt, last: ast.stmt | None) -> bool:
        """Whether something is changed in place between two statements (None: the end), where nothing may
        move then."""
        every = list(self.every())
        between = every[every.index(first) : None if last is None else every.index(last)]
        return any(statement in self.inplace for statement in between)

    # Values

    def defined_by(self, name: str) -> ast.Assign | None:
        """The statement that computes a name, None for one that has no definition."""
        if name not in self.definitions:
            return None
        return next((each for each in self.assignments() if name_of(each) == name), None)

    def uses(self, name: str) -> int:
        """How many times a name is read."""
        return sum(names_in(tree).count(name) for tree in (*self.statements, self.result))

    def follow(self, value: ast.expr) -> ast.expr:
        """The value behind names that only rename."""
        name = self.last_name(value)
        return value if name is None else self.definitions[name]

    def last_name(self, value: ast.expr) -> str | None:
        """The name that holds a value: the end of a chain of renamings."""
        name = None
        while isinstance(value, ast.Name) and value.id in self.definitions:
            name, value = value.id, self.definitions[value.id]
        return name

    def names_of(self, name: str) -> set[str]:
        """The names that hold the value of a name, on some path at least."""
        names = {name}
        for statement in self.assignments():
            if isinstance(statement.value, ast.Name) and statement.value.id in names:
                names.add(name_of(statement))
        return names

    # Back to a function

    def compile(self, is_pure: IsPure) -> types.FunctionType:
        """The function that runs the program, with the globals of the original."""
        self.drop_unused(is_pure)
        self._move_into_branches(is_pure)
        self._free(self.statements, {*names_in(self.result)})
        members = _ReadMembers(self.module)
        body = [*map(members.visit, [*self.statements, ast.Return(self.result)])]
        body = [*members.prologue(), *body]
        (forward,) = ast.parse("def forward(): pass").body
        assert isinstance(forward, ast.FunctionDef)
        forward.args, forward.body = self.arguments, body
        return compile_forward(self.function, forward)

    def drop_unused(self, is_pure: IsPure) -> None:
        """Drops what nothing reads and what has no effect."""
        self._drop_unused(self.statements, set(names_in(self.result)), is_pure)

    def _drop_unused(self, block: Block, read: set[str], is_pure: IsPure) -> None:
        for statement in block[::-1]:
            if isinstance(statement, If):
                self._drop_unused(statement.body, read, is_pure)
                self._drop_unused(statement.orelse, read, is_pure)
                read.update(names_in(statement.test))
            elif (
                isinstance(statement, ast.Assign)
                and name_of(statement) not in read
                and is_pure(statement.value, self.module)
            ):
                self.definitions.pop(name_of(statement), None)
                block.remove(statement)
            else:
                read.update(names_in(statement))

    def _move_into_branches(self, is_pure: IsPure) -> None:
        """A value that only one branch of an `if` reads is computed there."""
        for block in self.blocks():
            for statement in block[::-1]:
                if isinstance(statement, ast.Assign) and is_pure(statement.value, self.module):
                    branch = self._only_branch_that_reads(block, statement)
                    if branch is not None:
                        block.remove(statement)
                        branch.insert(0, statement)

    def _only_branch_that_reads(self, block: Block, statement: ast.Assign) -> Block | None:
        name = name_of(statement)
        readers = [each for each in (*block, self.result) if name in names_in(each)]
        reader = readers[0] if len(readers) == 1 else None
        if not isinstance(reader, If) or name in names_in(reader.test) or name not in self.definitions:
            return None
        if statement in self.inplace or self.mutates_between(statement, reader):
            return None
        branches = (reader.body, reader.orelse)
        inside = [branch for branch in branches if any(name in names_in(each) for each in branch)]
        return inside[0] if len(inside) == 1 else None

    def _free(self, block: Block, read: set[str]) -> set[str]:
        """Sets variables to None behind the last statement that reads them, so that tensors are freed early.

        Args:
            read: the names that are read after the block.

        Returns: those that are read from the block on.
        """
        for place in reversed(range(len(block))):
            statement = block[place]
            if isinstance(statement, If):
                branches = (statement.body, statement.orelse)
                statement.body.append(ast.Pass())  # which may be empty
                inside = [self._free(branch, read) for branch in branches]
                read = inside[0] | inside[1]
                for branch, names in zip(branches, inside, strict=True):
                    branch[:0] = self._set_to_none(read - names)
                read = read | {*names_in(statement.test)}
            else:
                stored, loaded = {*names_in(statement, ast.Store)}, {*names_in(statement)}
                block[place + 1 : place + 1] = self._set_to_none((stored | loaded) - read)
                # In a loop what is assigned is read again, and an `except` may skip what is assigned.
                read = (read - stored if isinstance(statement, ast.Assign) else read | stored) | loaded
        return read

    def _set_to_none(self, names: set[str]) -> Block:
        own: list[ast.expr] = [ast.Name(n, ast.Store()) for n in sorted(names & self._variables)]
        return [ast.Assign(own, ast.Constant(None))] if own else []


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


class _ReadMembers(ast.NodeTransformer):
    """self.child and self.parameter are read from the dictionaries that hold them: attributes are slow.

    The instance's own dictionary comes first: something may be written there over them.
    """

    def __init__(self, module: nn.Module):
        self.places = {
            name: place
            for place in ("_modules", "_parameters")
            for name in getattr(module, place)
            if not hasattr(type(module), name)
        }
        self.read: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        place = self.places.get(node.attr) if isinstance(node.ctx, ast.Load) else None
        if place is None or not isinstance(node.value, ast.Name) or node.value.id != "self":
            return node
        self.read |= {"__dict__", place}
        name, own = repr(node.attr), _LOCALS["__dict__"]
        return ast.IfExp(
            test=ast.parse(f"{name} in {_LOCALS[place]} and {name} not in {own}", mode="eval").body,
            body=ast.parse(f"{_LOCALS[place]}[{name}]", mode="eval").body,
            orelse=node,
        )

    def prologue(self) -> list[ast.stmt]:
        """Gives the dictionaries that are read names."""
        return [
            ast.parse(f"{name} = self.{place}").body[0]
            for place, name in _LOCALS.items()
            if place in self.read
        ]


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
