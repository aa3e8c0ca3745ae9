"""Parses a method into a program of single statements, where each value has a name of its own.

The source is parsed, an `if` that the module's own attributes decide (`if self.norm_topk_prob`) becomes the
branch that runs, and every value gets a name. What is not understood stays as it is, as an opaque statement;
what cannot be kept raises `Unsupported`.
"""

import ast
import re
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..reads import record
from ..record import original_class
from .building import code
from .programs import (
    Block,
    If,
    Program,
    RenameVariables,
    Unsupported,
    arguments_in,
    calls_in,
    copied,
    name_of,
    names_in,
    syntax_of,
)

# Inplace operators keep their meaning: x *= y becomes x_2 = _inplace.imul(x_1, y).
_INPLACE = {ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.Div: "itruediv"}
# Decorators that change nothing in what a forward computes, and wrappers that only act in training.
_TRANSPARENT_DECORATORS = {"auto_docstring", "force_accelerate_hooks"}
_TRAINING_WRAPPERS = {"forward_with_checkpointing"}
_HOOKS = "transformers.integrations.accelerate"  # has the wrapper of force_accelerate_hooks
_VIEWS = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "expand",
    "transpose",
    "chunk",
    "to",
    "float",
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_UNSUPPORTED = (*_COMPREHENSIONS, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def _parse(function: Callable) -> ast.FunctionDef:
    tree = syntax_of(function)
    if tree is None:
        raise Unsupported("its source is not available")
    if not isinstance(tree, ast.FunctionDef):
        raise Unsupported("its forward is not a plain function")
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in tree.decorator_list}
    if decorators - _TRANSPARENT_DECORATORS or function.__closure__:
        raise Unsupported("its forward is decorated or uses super()")
    return tree


def own_forward(module: nn.Module) -> types.FunctionType:
    """The function behind the forward of the module's class."""
    function: Any = original_class(module).forward
    while _is_transparent(function):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise Unsupported("its forward is not a plain function")
    return function


def _is_transparent(function: Any) -> bool:
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    return function.__code__.co_name in _TRAINING_WRAPPERS or function.__globals__["__name__"] == _HOOKS


def straighten(module: nn.Module, function: types.FunctionType | None = None) -> "Program":
    """The program of `function` (the module's forward) in evaluation mode."""
    function = own_forward(module) if function is None else function
    return _Builder(module, function).build()


class _Rename(RenameVariables):
    """Names as the program calls them; `self.training` is False: the program only runs in evaluation mode."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "training" and isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.Constant(False)
        return self.generic_visit(node)


def attributes_in(expression: ast.expr) -> set[str]:
    """The attributes of `self` that an expression reads, by their paths."""
    texts = {ast.unparse(node) for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
    for call in calls_in(expression):
        if ast.unparse(call.func) in ("getattr", "hasattr"):
            owner, name, *_ = call.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                texts.add(f"{ast.unparse(owner)}.{name.value}")
    return {text.removeprefix("self.") for text in texts if re.fullmatch(r"self(\.\w+)+", text)}


def _switches_autocast_off(context: ast.expr) -> bool:
    if not isinstance(context, ast.Call) or "enabled=False" not in map(ast.unparse, context.keywords):
        return False
    return ast.unparse(context.func).rpartition(".")[2] in ("maybe_autocast", "autocast")


def _unpacked_if_tuple(node: ast.If) -> str | None:
    """x of `if isinstance(x, tuple): x, _ = x`."""
    if node.orelse or len(node.body) != 1 or not isinstance(assign := node.body[0], ast.Assign):
        return None
    name, target = ast.unparse(assign.value), ast.unparse(assign.targets[0])
    is_test = ast.unparse(node.test) == f"isinstance({name}, tuple)"
    return name if is_test and target.strip("()") == f"{name}, _" else None


def _unrolled(value: ast.expr) -> ast.expr:
    """(f(a), f(b)) for (f(x) for x in (a, b)); every other value as it is."""
    if not isinstance(value, (ast.GeneratorExp, ast.ListComp)) or len(value.generators) != 1:
        return value
    (loop,) = value.generators
    elements = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else []
    names = [element.id for element in elements if isinstance(element, ast.Name)]
    if not isinstance(loop.target, ast.Name) or loop.ifs or loop.is_async or len(names) != len(elements):
        return value
    variable = loop.target.id
    values = [RenameVariables({variable: name}).visit(copied(value.elt)) for name in names]
    return ast.Tuple(values, ast.Load()) if values else value


def _renaming(name: str, value: str) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], ast.Name(value, ast.Load()))


class _Builder:
    def __init__(self, module: nn.Module, function: types.FunctionType):
        self.tree = _parse(function)
        self.globals = function.__globals__
        arguments = copied(self.tree.args)
        for argument in arguments_in(arguments):
            argument.annotation = None
        self.program = Program(module, function, arguments)
        self.statements = self.program.statements  # the block that is built
        self.merged: dict[str, list[str]] = {}  # {name behind an `if`: the names that it has in the branches}
        self.names = {each: each for each in self.program.arguments_names()}
        self.returned = False

    def build(self) -> Program:
        self.block(self.tree.body)
        return self.program

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if self.returned:
                return
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        handler = getattr(self, f"on_{type(node).__name__.lower()}", self.opaque)
        handler(node)

    def expression(self, node: ast.expr) -> ast.expr:
        if any(isinstance(child, _UNSUPPORTED) for child in ast.walk(node)):
            raise Unsupported("its forward has a comprehension or lambda")
        return _Rename(self.names).visit(copied(node))

    def name(self, stem: str, value: ast.expr) -> ast.Name:
        """A name for a value that the forward has none for."""
        statement = self.program.assign(stem, value)
        self.statements.append(statement)
        return ast.Name(name_of(statement), ast.Load())

    def define(self, variable: str, value: ast.expr, code: ast.expr | None = None) -> ast.Assign:
        statement = self.program.assign(variable, value, code)
        self.statements.append(statement)
        self.names[variable] = name_of(statement)
        return statement

    # Statements

    def on_return(self, node: ast.Return) -> None:
        result = self.expression(node.value) if node.value else ast.Constant(None)
        if isinstance(result, ast.BinOp):  # a sum that rules may fuse has a name
            result = self.name("result", result)
        self.program.result = result
        self.returned = True

    def on_pass(self, node: ast.Pass) -> None:
        pass

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.on_assign(ast.Assign(targets=[node.target], value=node.value))

    def on_assign(self, node: ast.Assign) -> None:
        is_unpacked = all(isinstance(target, ast.Tuple) for target in node.targets)
        value = self.expression(_unrolled(node.value) if is_unpacked else node.value)
        if len(node.targets) > 1:
            value = self.name("value", value)
        for target in node.targets:
            self.bind(target, value)

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.define(target.id, value)
            return
        elements = target.elts if isinstance(target, ast.Tuple) else []
        names = [element.id for element in elements if isinstance(element, ast.Name)]
        if not names or len(names) != len(elements):
            raise Unsupported("its forward assigns to an attribute or into a tensor")
        self.unpack(names, value)

    def unpack(self, names: list[str], value: ast.expr) -> None:
        if isinstance(value, ast.Tuple) and len(value.elts) == len(names):
            defined = [self.program.assign(name, item) for name, item in zip(names, value.elts, strict=True)]
        else:
            defined = [self.program.assign(name, value) for name in names]
            self.statements.append(self.program.unpack(value, defined))
        self.statements += defined
        for name, statement in zip(names, defined, strict=True):
            self.names[name] = name_of(statement)

    def on_augassign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name) or type(node.op) not in _INPLACE:
            raise Unsupported("its forward assigns to an attribute or into a tensor")
        self.require_unshared(node.target.id)
        before = ast.Name(self.names[node.target.id], ast.Load())
        operand = self.expression(node.value)
        function = ast.Attribute(ast.Name("_inplace", ast.Load()), _INPLACE[type(node.op)], ast.Load())
        code = ast.Call(function, [before, operand], [])
        self.program.inplace.append(self.define(node.target.id, ast.BinOp(before, node.op, operand), code))

    def on_expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        value = self.expression(node.value)
        variable = self.changed_in_place(node.value)
        if variable is None:
            self.statements.append(ast.Expr(value))
        else:
            self.require_unshared(variable)
            self.program.inplace.append(self.define(variable, value))

    def changed_in_place(self, call: ast.expr) -> str | None:
        """x of a statement x.method_(...)."""
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return None
        owner = call.func.value
        if not isinstance(owner, ast.Name) or owner.id not in self.names:
            return None
        return owner.id if call.func.attr.endswith("_") else None

    def require_unshared(self, variable: str) -> None:
        """An in-place change must not be seen through another variable, whose definition would be stale."""
        if variable not in self.names:
            raise Unsupported("its forward changes a value in place that it does not own")
        memory = self.memory(self.names[variable])
        others = (name for other, name in self.names.items() if other != variable)
        is_argument = memory & self.program.arguments_names()
        if is_argument or any(self.memory(name) & memory for name in others):
            raise Unsupported("its forward changes a tensor in place that has another name")

    def memory(self, name: str) -> set[str]:
        """The owners of a value's memory, as text. All views of a tensor have the same owner."""
        while True:
            name = self.program.last_name(ast.Name(name, ast.Load())) or name
            if name in self.merged:
                return set().union(*map(self.memory, self.merged[name]))
            value = self.program.definitions.get(name)
            if (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Attribute)
                and value.func.attr in _VIEWS
            ):
                value = value.func.value
            elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
                if isinstance(self.program.definitions.get(value.value.id), ast.Call):
                    return {ast.unparse(value)}  # one of several results
                value = value.value
            else:
                return {name}
            if not isinstance(value, ast.Name):
                return {ast.unparse(value)}
            name = value.id

    def on_with(self, node: ast.With) -> None:
        """Regions that switch autocast off are transparent: the program never runs under autocast."""
        if len(node.items) == 1 and _switches_autocast_off(node.items[0].context_expr):
            self.block(node.body)
        else:
            self.opaque(node)

    def on_if(self, node: ast.If) -> None:
        variable = _unpacked_if_tuple(node)
        if variable is not None and variable in self.names:
            self.define(variable, code(f"first_of({self.names[variable]})"))
            return
        outcome = self.evaluate(node.test)
        if outcome is None:
            self.undecided(node)
        else:
            self.block(node.body if outcome else node.orelse)

    def undecided(self, node: ast.If) -> None:
        """Two blocks; a variable that they assign has one more name behind them."""
        program, statements, before = self.program, self.statements, self.names
        kept = dict(program.definitions), list(program.inplace), dict(self.merged)
        branches: list[tuple[Block, dict[str, str]]] = []
        try:
            test = self.expression(node.test)
            for body in (node.body, node.orelse):
                self.statements, self.names = [], dict(before)
                self.block(body)
                if self.returned:
                    raise Unsupported("its forward returns from within a branch or defines functions")
                branches.append((self.statements, self.names))
        except Unsupported:
            program.definitions, program.inplace, self.merged = kept
            self.statements, self.names, self.returned = statements, before, False
            self.opaque(node)
            return
        self.statements, self.names = statements, dict(before)
        for variable in sorted({name for _, names in branches for name in names}):
            versions = [names.get(variable) for _, names in branches]
            if versions[0] == versions[1]:
                continue
            merged = self.names[variable] = program.fresh(variable)
            self.merged[merged] = [version for version in versions if version is not None]
            for (block, _), version in zip(branches, versions, strict=True):
                if version is not None:
                    block.append(_renaming(merged, version))
        self.statements.append(If(test, *(block for block, _ in branches)))

    def evaluate(self, test: ast.expr) -> bool | None:
        """The outcome of a condition on the module's attributes alone, else None."""
        expression = _Rename({}).visit(copied(test))
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        if names & (self.names.keys() - {"self"}):
            return self.evaluate_conjunction(expression)
        try:
            code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<condition>", "eval")
            value = eval(code, self.globals, {"self": self.program.module})
        except Exception:
            return None
        if isinstance(value, Tensor):
            return None
        for path in attributes_in(expression):
            record(self.program.module, path)
        return bool(value)

    def evaluate_conjunction(self, test: ast.expr) -> bool | None:
        """`False and x` is False whatever x is."""
        if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
            return None
        return False if any(self.evaluate(value) is False for value in test.values) else None

    def opaque(self, node: ast.stmt) -> None:
        """A statement kept as it is. The variables it assigns get one name before, in and after it."""
        if any(
            isinstance(child, (ast.Return, ast.FunctionDef, ast.ClassDef, *_UNSUPPORTED))
            for child in ast.walk(node)
        ):
            raise Unsupported("its forward returns from within a branch or defines functions")
        for variable in sorted(set(names_in(node, ast.Store))):
            name = self.program.fresh(variable)
            if variable in self.names:
                self.statements.append(_renaming(name, self.names[variable]))
            self.names[variable] = name
        statement = _Rename(self.names).visit(copied(node))
        self.statements.append(statement)
        self.program.inplace.append(statement)
