"""Forms of statements, and what takes their place.

    Rewrite("S = R + Y; N = NORM(S)", "N, S = residual_norm(NORM, R, Y)", where)

A form is a call or a list of assignments. In a form

- a name that it assigns stands for a value that the program names, any other upper-case name for any
  expression, `*REST` for the other arguments and `**OPTIONS` for the other keywords of a call;
- as a function, an upper-case name is a child of the module, NORM(S), and one with an underscore in front is
  a function of the model's file, _ROPE(Q, K, COS, SIN);
- functions in lower case are those of `runtime`, `imul` (an in-place product), `float32` (a cast, however
  written) and `shaped` (its argument behind any number of view and reshape); torch.cat(...) is a function of
  torch and X.transpose(1, 2) a method;
- sums match in either order; what has no name in it stands for itself.

A value may have a name in the program where the form has none. What every rewrite relies on is checked here:
nothing is changed in place between the first statement and the last, nothing else reads a value that is gone
afterwards, and values that are computed together are computed in one block.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ...report import NOTHING_NEW, Done
from .building import RESHAPING, SHAPED, child_of_call, code, replace_in
from .formulas import Reader, is_pure
from .programs import Program, calls_in, name_of, names_in

# What a name stands for: an expression; the arguments of *REST; the keywords of **OPTIONS.
Value: TypeAlias = Any


@dataclass(frozen=True)
class Match:
    """Where a form was found.

    Attributes:
        program: what it was found in.
        place: the statement that reads what was found, None for the program's result.
        values: what its upper-case names stand for.
        statements: those of the names that it assigns.
        gone: statements that only the match reads; each may be dropped with what it names.
        moved: statements beside the last one, each with those that read it: they may run in front of `place`.
    """

    program: Program
    place: ast.stmt | None
    values: dict[str, Value] = field(default_factory=dict)
    statements: dict[str, ast.Assign] = field(default_factory=dict)
    gone: tuple[ast.Assign, ...] = ()
    moved: tuple[ast.Assign, ...] = ()

    def child(self, name: str) -> str:
        """The name of the child that NAME(...) calls."""
        return ast.unparse(self.values[name]).removeprefix("self.")

    def module(self, name: str) -> nn.Module:
        return self.program.module.get_submodule(self.child(name))

    def function(self, name: str) -> Callable:
        """The function that _NAME(...) calls."""
        found: Callable = self.program.function.__globals__[ast.unparse(self.values[name])]
        return found

    def fill(self, text: str | ast.expr) -> ast.expr:
        """The expression that `text` is with the values of its names."""
        names = {name: ast.Name(name_of(each), ast.Load()) for name, each in self.statements.items()}
        filled: ast.expr = code(text, **names, **self.values)
        return filled

    def drop(self) -> None:
        """Takes the statements away that only the match read."""
        for statement in self.gone:
            self.program.remove(statement)


class Form:
    """A form as text; `kept` are names of it whose values stay. Those that it reads twice may stay."""

    def __init__(self, text: str, kept: tuple[str, ...] = ()):
        self.parts: dict[str, ast.expr] = {}
        for statement in ast.parse(text).body:
            assert isinstance(statement, (ast.Assign, ast.Expr))
            self.name = name_of(statement) if isinstance(statement, ast.Assign) else ""
            self.parts[self.name] = self.last = statement.value
        read = [name for part in self.parts.values() for name in names_in(part)]
        self.repeated = {name for name in self.parts if read.count(name) > 1 and name not in kept}
        self.kept = self.repeated.union(kept)
        self.beside = [name for name in self.parts if name != self.name and name not in read]

    def find(self, program: Program, value: ast.expr, until: ast.stmt | None) -> Iterator[Match]:
        """The ways in which a value has this form that the statement `until` (None: the end) reads."""
        for last in self._matches(self.last, value, Match(program, until)):
            for match in self._all_beside(self.beside, last):
                first = (*match.gone, *match.statements.values())
                if not any(program.mutates_between(statement, until) for statement in first):
                    yield match

    def _all_beside(self, names: list[str], match: Match) -> Iterator[Match]:
        """Matches with statements in front of the last one that it does not read."""
        if not names or match.place is None:
            yield match
            return
        block = match.program.block_of(match.place)
        for statement in block[: block.index(match.place)]:
            value = statement.value if isinstance(statement, ast.Assign) else ast.Constant(None)
            for found in self._structure(self.parts[names[0]], value, match):
                moved = _with_readers(match.program, statement, match.place)
                if moved is not None:
                    statements = found.statements | {names[0]: moved[0]}
                    found = replace(found, statements=statements, moved=(*found.moved, *moved))
                    yield from self._all_beside(names[1:], found)

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
        if name in match.statements:
            yield from [match] if match.statements[name] is chain[-1] else []
            return
        if name in self.kept:
            match = replace(match, statements=match.statements | {name: chain[-1]})
        elif all(program.uses(name_of(statement)) == 1 for statement in chain):
            match = replace(match, gone=(*match.gone, *chain))
        elif not self._may_be_repeated(form):
            return
        yield from self._structure(form, value, match)

    def _may_be_repeated(self, form: ast.expr) -> bool:
        """Whether something else may read a value of this form: a cast, or an item of what stays."""
        if isinstance(form, ast.Subscript):
            return isinstance(form.value, ast.Name) and form.value.id in self.repeated
        return _function_of(form) == "float32"

    def _structure(self, form: ast.expr, value: ast.expr, match: Match) -> Iterator[Match]:
        if isinstance(form, ast.Call):
            if isinstance(value, ast.Call):
                yield from self._call(form, value, match)
        elif isinstance(form, ast.Subscript):
            if isinstance(value, ast.Subscript) and ast.dump(form.slice) == ast.dump(value.slice):
                yield from self._matches(form.value, value.value, match)
        elif isinstance(form, ast.BinOp):
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                for left, right in ((value.left, value.right), (value.right, value.left)):
                    yield from self._all([form.left, form.right], [left, right], match)
        elif isinstance(form, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(form.elts):
                yield from self._all(form.elts, value.elts, match)
        elif ast.dump(form) == ast.dump(value):
            yield match

    def _call(self, form: ast.Call, value: ast.Call, match: Match) -> Iterator[Match]:
        name = _function_of(form)
        if name == "float32":
            node = Reader(match.program).read(value)
            if (node.op, node.args[1:]) == ("cast", ("float32",)) and isinstance(value.func, ast.Attribute):
                yield from self._matches(form.args[0], value.func.value, match)
        elif name == SHAPED:
            yield from self._shaped(form, value, match)
        elif _calls(match.program, value, name) and (pairs := _arguments(form, value)) is not None:
            forms, values, others = pairs
            if _is_method(name):
                forms, values = [_owner(form), *forms], [_owner(value), *values]
            elif name.isupper():
                others[name] = value.func
            yield from self._all(forms, values, replace(match, values=match.values | others))

    def _shaped(self, form: ast.Call, value: ast.Call, match: Match) -> Iterator[Match]:
        steps = match.values.get(SHAPED, ())
        for inner in self._matches(form.args[0], value, match):
            yield replace(inner, values={SHAPED: steps, **inner.values})
        if isinstance(value.func, ast.Attribute) and value.func.attr in RESHAPING:
            match = replace(match, values=match.values | {SHAPED: (value, *steps)})
            yield from self._matches(form, value.func.value, match)

    def _all(self, forms: list[ast.expr], values: list[ast.expr], match: Match) -> Iterator[Match]:
        if not forms:
            yield match
            return
        for first in self._matches(forms[0], values[0], match):
            yield from self._all(forms[1:], values[1:], first)


def _with_readers(program: Program, statement: ast.stmt, until: ast.stmt) -> list[ast.Assign] | None:
    """A statement and those in front of `until` that read it, None if they may not run right before that."""
    block = program.block_of(until)
    moved: list[ast.Assign] = []
    names: set[str] = set()
    for each in block[block.index(statement) : block.index(until) + 1]:
        if each is not statement and not names & {*names_in(each)}:
            continue
        if not isinstance(each, ast.Assign) or each is until:
            return None
        if each is not statement and not is_pure(each.value, program.module):
            return None
        moved.append(each)
        names.add(name_of(each))
    return moved


def _function_of(form: ast.expr) -> str:
    return ast.unparse(form.func) if isinstance(form, ast.Call) else ""


def _is_method(name: str) -> bool:
    return "." in name and not name.startswith("torch.")


def _owner(call: ast.Call) -> ast.expr:
    """What a method is called on."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def _calls(program: Program, call: ast.Call, name: str) -> bool:
    """Whether a call is of the function that a form calls `name`."""
    if name.startswith("_"):
        found = program.function.__globals__.get(ast.unparse(call.func))
        return Reader(program).resolve(call.func) is found and callable(found)
    if name.isupper():
        return child_of_call(program, call) is not None
    if _is_method(name):
        return isinstance(call.func, ast.Attribute) and call.func.attr == name.rpartition(".")[2]
    if name.startswith("torch."):
        return Reader(program).resolve(call.func) is eval(name, {"torch": torch})
    return ast.unparse(call.func) in (f"_moe_mps.{name}", f"_inplace.{name}")


def _arguments(form: ast.Call, call: ast.Call) -> tuple[list[ast.expr], list[ast.expr], dict] | None:
    """The arguments of a form beside those of a call, and what *REST and **OPTIONS stand for."""
    forms, values = list(form.args), list(call.args)
    others: dict[str, Value] = {}
    if forms and isinstance(forms[-1], ast.Starred):
        rest = ast.unparse(forms.pop()).removeprefix("*")
        values, others[rest] = values[: len(forms)], values[len(forms) :]
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    for keyword in form.keywords:
        if keyword.arg is not None and keyword.arg in named:
            forms.append(keyword.value)
            values.append(named.pop(keyword.arg))
        elif keyword.arg is None:
            others[ast.unparse(keyword.value)] = [each for each in call.keywords if each.arg in named]
            named = {}
        else:
            return None
    fits = len(forms) == len(values) and not named
    return None if not fits or any(isinstance(v, ast.Starred) for v in values) else (forms, values, others)


class Rewrite:
    """A form, and what replaces it wherever `where` says what runs then, maybe NOTHING_NEW.

    `where` gets the match; it may add values that the replacement names. A replacement is an expression, or
    assignments of new values to names of the form. A call that gives several of them stands where the first
    was computed, in a form with statements beside the last one in front of that.
    """

    def __init__(self, form: str, replacement: str, where: Callable[[Match], Done | None]):
        self.steps: list[tuple[list[str], ast.expr]] = []
        for statement in ast.parse(replacement).body:
            assert isinstance(statement, (ast.Assign, ast.Expr))
            results = statement.targets[0] if isinstance(statement, ast.Assign) else ast.Tuple([])
            names = results.elts if isinstance(results, ast.Tuple) else [results]
            self.steps.append(([ast.unparse(name) for name in names], statement.value))
        self.results = [name for names, _ in self.steps for name in names]
        self.form = Form(form, tuple(self.results))
        self.where = where

    def __call__(self, program: Program) -> None:
        places: list[tuple[Any, ast.expr]] = []
        if self.results:
            places += [(s, s.value) for s in program.assignments() if name_of(s) in program.definitions]
        else:
            for statement in program.every():
                if isinstance(statement, (ast.Assign, ast.Expr)) and statement not in program.inplace:
                    places += [(statement, call) for call in calls_in(statement.value)]
        for statement, value in places:
            if not self.results or name_of(statement) in program.definitions:
                self._apply(program, statement, value)

    def _apply(self, program: Program, place: Any, value: ast.expr) -> None:
        for match in self.form.find(program, value, place):
            if self.results:
                match = replace(match, statements=match.statements | {self.form.name: place})
            blocks = [program.block_of(each) for each in match.statements.values()]
            done = self.where(match) if all(block is blocks[0] for block in blocks) else None
            if done is None:
                continue
            program.rewrites += [done] if done != NOTHING_NEW else []
            for results, replacement in self.steps:
                new = match.fill(replacement)
                if results:
                    self._assign(match, results, new)
                else:
                    replace_in(program, place, value, new)
            match.drop()
            for name in self.form.repeated:
                if not program.uses(name_of(match.statements[name])):
                    program.remove(match.statements[name])
            return

    def _assign(self, match: Match, results: list[str], new: ast.expr) -> None:
        program = match.program
        statements = [match.statements[name] for name in results]
        block = program.block_of(statements[0])
        if len(statements) == 1:
            program.replace(statements[0], new)
        else:
            for each in match.moved:
                block.remove(each)
            place = block.index(match.place) if match.moved and match.place else 0
            block[place:place] = match.moved
            first = min(statements, key=block.index)
            program.insert(first, program.unpack(new, statements))
        program.inplace = [each for each in program.inplace if each not in statements]
