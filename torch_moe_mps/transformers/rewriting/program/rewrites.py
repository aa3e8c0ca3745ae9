"""Forms of statements, and what takes their place.

    Rewrite("S = R + Y; N = NORM(S)", "N, S = residual_norm(NORM, R, Y)", where)

A form is a call; a few assignments of which each reads the one before it; or `return` with what the forward
returns, the first of it if that is several values. In a form

- a name that it assigns stands for a value that the program names, any other upper-case name for any
  expression, `*REST` for the other arguments and `**OPTIONS` for the other keywords of a call;
- as a function, an upper-case name is a child of the module, NORM(S), and one with an underscore in front is
  a function of the model's file, _ROPE(Q, K, COS, SIN);
- functions in lower case are those of `runtime`, `linear` (torch's), `imul` (an in-place product), `float32`
  (a cast, however written) and `shaped` (its argument behind any number of view and reshape);
- sums match in either order.

A value may have a name in the program where the form has none. What every rewrite relies on is checked here:
nothing is changed in place between the first statement and the last, nothing else reads a value that is gone
afterwards, and values that are computed together are computed in one block.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import nn

from .building import calls, child_of_call, first_result, helper, replace_in, set_first_result
from .formulas import Reader
from .programs import Program, copied, name_of

# What a name stands for: an expression; the arguments of *REST; the keywords of **OPTIONS.
Value: TypeAlias = Any

_RESHAPING = {"view", "reshape"}
_INSIDE = "shaped"  # the name that stands for the argument of `shaped` in the value of that name


@dataclass(frozen=True)
class Match:
    """Where a form was found.

    Attributes:
        program: what it was found in.
        place: the statement that reads what was found, None for the program's result.
        values: what its upper-case names stand for.
        statements: those of the names that it assigns.
        gone: statements that only the match reads; each may be dropped with what it names.
    """

    program: Program
    place: ast.stmt | None
    values: dict[str, Value] = field(default_factory=dict)
    statements: dict[str, ast.Assign] = field(default_factory=dict)
    gone: tuple[ast.Assign, ...] = ()

    def child(self, name: str) -> str:
        """The name of the child that NAME(...) calls."""
        return ast.unparse(self.values[name]).removeprefix("self.")

    def module(self, name: str) -> nn.Module:
        return self.program.module.get_submodule(self.child(name))

    def function(self, name: str) -> Callable:
        """The function that _NAME(...) calls."""
        found: Callable = self.program.function.__globals__[ast.unparse(self.values[name])]
        return found

    def fill(self, text: str) -> ast.expr:
        """The expression that `text` is with the values of its names."""
        return _with(self.values, ast.parse(text, mode="eval").body)

    def drop(self) -> None:
        """Takes the statements away that only the match read."""
        for statement in self.gone:
            self.program.remove(statement)


class Form:
    """A form as text; `kept` are names of it whose values stay."""

    def __init__(self, text: str, kept: tuple[str, ...] = ()):
        self.parts: dict[str, ast.expr] = {}
        self.kept = kept
        for statement in ast.parse(text).body:
            assert isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) and statement.value is not None
            name = name_of(statement) if isinstance(statement, ast.Assign) else ""
            self.parts[name] = self.last = statement.value
        self.name = name

    def find(self, program: Program, value: ast.expr, until: ast.stmt | None) -> Iterator[Match]:
        """The ways in which a value has this form that the statement `until` (None: the end) reads."""
        for match in self._matches(self.last, value, Match(program, until)):
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
        elif name == "shaped":
            yield from self._shaped(form, value, match)
        elif _calls(match.program, value, name) and (pairs := _arguments(form, value)) is not None:
            if name.isupper():
                match = replace(match, values=match.values | {name: value.func})
            forms, values, others = pairs
            yield from self._all(forms, values, replace(match, values=match.values | others))

    def _shaped(self, form: ast.Call, value: ast.Call, match: Match) -> Iterator[Match]:
        around = match.values.get(_INSIDE, ast.Name(_INSIDE, ast.Load()))
        for inner in self._matches(form.args[0], value, match):
            yield replace(inner, values={_INSIDE: around, **inner.values})
        if isinstance(value.func, ast.Attribute) and value.func.attr in _RESHAPING:
            step = ast.Attribute(ast.Name(_INSIDE, ast.Load()), value.func.attr, ast.Load())
            around = _with({_INSIDE: ast.Call(step, value.args, value.keywords)}, around)
            match = replace(match, values=match.values | {_INSIDE: around})
            yield from self._matches(form, value.func.value, match)

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
    if name.startswith("_"):
        found = program.function.__globals__.get(ast.unparse(call.func))
        return Reader(program).resolve(call.func) is found and callable(found)
    if name.isupper():
        return child_of_call(program, call) is not None
    if name == "linear":
        return Reader(program).resolve(call.func) is F.linear
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
    """A form, and the call that replaces it wherever `where` has a line for the report, maybe an empty one.

    `where` gets the match; it may add values that the replacement names. Of several results each takes the
    place of the form's value of that name. The call stands where the first of them was computed.
    """

    def __init__(self, form: str, replacement: str, where: Callable[[Match], str | None]):
        (statement,) = ast.parse(replacement).body
        assert isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) and statement.value is not None
        results = statement.targets[0] if isinstance(statement, ast.Assign) else ast.Tuple([])
        names = results.elts if isinstance(results, ast.Tuple) else [results]
        self.is_returned = isinstance(statement, ast.Return)
        self.results = [ast.unparse(name) for name in names]
        self.replacement = statement.value
        self.form = Form(form, tuple(self.results))
        self.where = where

    def __call__(self, program: Program) -> None:
        if self.is_returned:
            self._apply(program, None, first_result(program))
            return
        places: list[tuple[ast.Assign, ast.expr]] = list(calls(program))
        if self.results:
            places = [(s, s.value) for s in program.assignments() if name_of(s) in program.definitions]
        for statement, value in places:
            if name_of(statement) in program.definitions or not self.results:
                self._apply(program, statement, value)

    def _apply(self, program: Program, statement: ast.Assign | None, value: ast.expr) -> None:
        for match in self.form.find(program, value, statement):
            if statement is not None and self.results:
                match = replace(match, statements=match.statements | {self.form.name: statement})
            blocks = [program.block_of(each) for each in match.statements.values()]
            note = self.where(match) if all(block is blocks[0] for block in blocks) else None
            if note is None:
                continue
            program.rewrites += [note] if note else []
            new = _with(match.values, self.replacement)
            if statement is None:
                set_first_result(program, new)
            elif self.results:
                self._assign(match, new)
            else:
                replace_in(program, statement, value, new)
            match.drop()
            return

    def _assign(self, match: Match, new: ast.expr) -> None:
        program = match.program
        statements = [match.statements[name] for name in self.results]
        if len(statements) > 1:
            first = min(statements, key=program.block_of(statements[0]).index)
            program.insert(first, program.unpack(new, statements))
        else:
            program.replace(statements[0], new)
        program.inplace = [each for each in program.inplace if each not in statements]


def _with(values: dict[str, Value], replacement: ast.expr) -> ast.expr:
    """The text of a replacement with the values that a match gave its names."""
    new: ast.expr = _Replacement(values).visit(copied(replacement))
    return new


class _Replacement(ast.NodeTransformer):
    def __init__(self, values: dict[str, Value]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name):
            return self.generic_visit(node)
        if node.func.id == "shaped":
            return _with({_INSIDE: self.visit(node.args[0])}, self.values[_INSIDE])
        arguments = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                arguments += copied(self.values[ast.unparse(argument.value)])
            else:
                arguments.append(self.visit(argument))
        call = helper(node.func.id, *arguments)
        for keyword in node.keywords:
            if keyword.arg is None:
                call.keywords += copied(self.values[ast.unparse(keyword.value)])
            else:
                call.keywords.append(ast.keyword(keyword.arg, self.visit(keyword.value)))
        return call
