"""Forms of statements, and what takes their place.

    Rewrite("S = R + Y; N = NORM(S)", "N, S = residual_norm(NORM, R, Y)", where)

A form is a call, or a few assignments of which each reads the one before it. A name that the form assigns
stands for a value that the program names, every other upper-case name for any expression; as a function it
stands for a child of the module, as in NORM(S). Sums match in either order. Functions in lower case are
those of `runtime`, `linear` (torch's), `imul` (an in-place product) and `float32` (a cast, however written).

A value may have a name in the program where the form has none. What every rewrite relies on is checked here:
nothing is changed in place between the first statement and the last, and nothing else reads a value that is
gone afterwards.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import nn

from .building import calls, child_of_call, helper, item, replace_in
from .formulas import Reader
from .programs import Program, name_of


@dataclass(frozen=True)
class Match:
    """Where a form was found.

    Attributes:
        program: what it was found in.
        values: what its upper-case names stand for.
        statements: those of the names that it assigns.
        gone: statements that only the match reads; each may be dropped with what it names.
    """

    program: Program
    values: dict[str, ast.expr] = field(default_factory=dict)
    statements: dict[str, ast.Assign] = field(default_factory=dict)
    gone: tuple[ast.Assign, ...] = ()

    def child(self, name: str) -> str:
        """The name of the child that NAME(...) calls."""
        return ast.unparse(self.values[name]).removeprefix("self.")

    def module(self, name: str) -> nn.Module:
        return self.program.module.get_submodule(self.child(name))

    def drop(self) -> None:
        """Takes the statements away that only the match read."""
        for statement in self.gone:
            self.program.statements.remove(statement)
            del self.program.definitions[name_of(statement)]


class Form:
    """A call or assignments, as text; `kept` are names of it whose values stay."""

    def __init__(self, text: str, kept: tuple[str, ...] = ()):
        self.parts: dict[str, ast.expr] = {}
        self.kept = kept
        for statement in ast.parse(text).body:
            assert isinstance(statement, (ast.Assign, ast.Expr))
            name = name_of(statement) if isinstance(statement, ast.Assign) else ""
            self.parts[name] = self.last = statement.value
        self.name = name

    def find(self, program: Program, value: ast.expr, until: ast.stmt) -> Iterator[Match]:
        """The ways in which `value`, which the statement `until` reads or computes, has this form."""
        start = Match(program)
        for match in self._matches(self.last, value, start):
            first = (*match.gone, *match.statements.values())
            if not any(program.mutates_between(statement, until) for statement in first):
                yield match

    def _matches(self, form: ast.expr, value: ast.expr, match: Match) -> Iterator[Match]:
        if not isinstance(form, ast.Name):
            yield from self._structure(form, value, match)
            yield from self._named("", form, value, match)
        elif form.id in self.parts:
            yield from self._named(form.id, self.parts[form.id], value, match)
        elif form.id not in match.values:
            yield replace(match, values=match.values | {form.id: value})
        elif ast.dump(match.values[form.id]) == ast.dump(value):
            yield match

    def _named(self, name: str, form: ast.expr, value: ast.expr, match: Match) -> Iterator[Match]:
        """Matches of a value that has a name in the program, and maybe one in the form."""
        program, chain = match.program, []
        while isinstance(value, ast.Name) and value.id in program.definitions:
            statement = program.defined_by(value.id)
            if statement is None:
                return
            chain.append(statement)
            value = statement.value
        if not chain:
            return
        if name in self.kept:
            match = replace(match, statements=match.statements | {name: chain[-1]})
        elif all(program.uses(name_of(statement)) == 1 for statement in chain):
            match = replace(match, gone=(*match.gone, *chain))
        elif _function_of(form) != "float32":  # a cast may be repeated
            return
        yield from self._structure(form, value, match)

    def _structure(self, form: ast.expr, value: ast.expr, match: Match) -> Iterator[Match]:
        if isinstance(form, ast.Call) and isinstance(value, ast.Call):
            yield from self._call(form, value, match)
        elif isinstance(form, ast.Subscript) and isinstance(value, ast.Subscript):
            if ast.dump(form.slice) == ast.dump(value.slice):
                yield from self._matches(form.value, value.value, match)
        elif isinstance(form, ast.BinOp) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            for left, right in ((value.left, value.right), (value.right, value.left)):
                yield from self._all([form.left, form.right], [left, right], match)

    def _call(self, form: ast.Call, value: ast.Call, match: Match) -> Iterator[Match]:
        if isinstance(form.func, ast.Attribute):  # a method, with constants
            same = not value.keywords and list(map(ast.dump, form.args)) == list(map(ast.dump, value.args))
            if same and isinstance(value.func, ast.Attribute) and value.func.attr == form.func.attr:
                yield from self._matches(form.func.value, value.func.value, match)
            return
        name = _function_of(form)
        if name == "float32":
            node = Reader(match.program).read(value)
            if (node.op, node.args[1:]) == ("cast", ("float32",)) and isinstance(value.func, ast.Attribute):
                yield from self._matches(form.args[0], value.func.value, match)
        elif len(form.args) == len(value.args) and not value.keywords and _calls(match.program, value, name):
            if name.isupper():
                match = replace(match, values=match.values | {name: value.func})
            yield from self._all(form.args, value.args, match)

    def _all(self, forms: list[ast.expr], values: list[ast.expr], match: Match) -> Iterator[Match]:
        if not forms:
            yield match
            return
        for first in self._matches(forms[0], values[0], match):
            yield from self._all(forms[1:], values[1:], first)


def _function_of(form: ast.expr) -> str:
    return ast.unparse(form.func) if isinstance(form, ast.Call) else ""


def _calls(program: Program, call: ast.Call, name: str) -> bool:
    """Whether a call is of the function that a form calls `name`."""
    if name.isupper():
        return child_of_call(program, call) is not None
    if name == "linear":
        return Reader(program).resolve(call.func) is F.linear
    return ast.unparse(call.func) in (f"_moe_mps.{name}", f"_inplace.{name}")


class Rewrite:
    """A form, and the call that replaces it wherever `where` has a line for the report.

    `where` gets the match; it may add values that the replacement names. Of several results each takes the
    place of the form's value of that name. The call stands where the first of them was computed.
    """

    def __init__(self, form: str, replacement: str, where: Callable[[Match], str | None]):
        (statement,) = ast.parse(replacement).body
        assert isinstance(statement, (ast.Assign, ast.Expr))
        results = statement.targets[0] if isinstance(statement, ast.Assign) else ast.Tuple([])
        names = results.elts if isinstance(results, ast.Tuple) else [results]
        self.results = [ast.unparse(name) for name in names]
        self.replacement = statement.value
        self.form = Form(form, tuple(self.results))
        self.where = where

    def __call__(self, program: Program) -> None:
        places: list[tuple[ast.Assign, ast.expr]] = list(calls(program))
        if self.results:
            places = [(s, s.value) for s in program.statements if isinstance(s, ast.Assign)]
        for statement, value in places:
            if statement in program.statements:
                self._apply(program, statement, value)

    def _apply(self, program: Program, statement: ast.Assign, value: ast.expr) -> None:
        for match in self.form.find(program, value, statement):
            if self.results:
                match = replace(match, statements=match.statements | {self.form.name: statement})
            note = self.where(match)
            if note is None:
                continue
            program.rewrites.append(note)
            new = _Replacement(match.values).visit(ast.parse(ast.unparse(self.replacement), mode="eval").body)
            if not self.results:
                replace_in(program, statement, value, new)
            else:
                self._assign(match, new)
            match.drop()
            return

    def _assign(self, match: Match, new: ast.expr) -> None:
        program = match.program
        statements = [match.statements[name] for name in self.results]
        values = [new]
        if len(statements) > 1:
            every = program.assign("results", new)
            program.statements.insert(min(map(program.statements.index, statements)), every)
            values = [item(name_of(every), index) for index in range(len(statements))]
        for statement, value in zip(statements, values, strict=True):
            statement.value = program.definitions[name_of(statement)] = value
            program.inplace = [each for each in program.inplace if each is not statement]


class _Replacement(ast.NodeTransformer):
    """The text of a replacement with the values that a match gave its names."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        keywords = {str(keyword.arg): self.visit(keyword.value) for keyword in node.keywords}
        return helper(ast.unparse(node.func), *map(self.visit, node.args), **keywords)
