"""From a method to a straight-line program.

The source is parsed, branches that the module's own attributes decide (`if self.norm_topk_prob`) are
resolved, and every value gets a name. What is not understood stays as it is, as an opaque statement; what
cannot be kept raises `Unsupported`.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable

from torch import Tensor, nn

from .building import helper
from .programs import Program, RenameVariables, Unsupported, copied, name_of, original_class
from .reads import record

# Inplace operators keep their meaning: x *= y becomes x_2 = _inplace.imul(x_1, y).
_INPLACE = {ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.Div: "itruediv"}
# Decorators that leave a function as it is, and wrappers that only act in training.
_TRANSPARENT_DECORATORS = {"auto_docstring"}
_TRAINING_WRAPPERS = {"forward_with_checkpointing"}
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


@functools.lru_cache(maxsize=4096)
def _parse(function: Callable) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError) as error:
        raise Unsupported("its source is not available") from error
    if not isinstance(tree, ast.FunctionDef):
        raise Unsupported("its forward is not a plain function")
    decorators = {ast.unparse(decorator) for decorator in tree.decorator_list} - _TRANSPARENT_DECORATORS
    if decorators or function.__closure__:
        raise Unsupported("its forward is decorated or uses super()")
    return tree


def own_forward(module: nn.Module) -> types.FunctionType:
    """The function behind the forward of the module's class."""
    function = original_class(module).forward
    while hasattr(function, "__wrapped__") and function.__code__.co_name in _TRAINING_WRAPPERS:
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise Unsupported("its forward is not a plain function")
    return function


def straighten(module: nn.Module, function: types.FunctionType | None = None) -> "Program":
    """The straight-line program of `function` (the module's forward) in evaluation mode."""
    function = own_forward(module) if function is None else function
    return _Builder(module, function).build()


class _Rename(RenameVariables):
    """Names as the program calls them; `self.training` is False: the program only runs in evaluation mode."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "training" and isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.Constant(False)
        return self.generic_visit(node)


def _attributes(expression: ast.expr) -> set[str]:
    """The attributes of `self` that an expression reads, by their paths."""
    texts = {ast.unparse(node) for node in ast.walk(expression) if isinstance(node, ast.Attribute)}
    for call in (node for node in ast.walk(expression) if isinstance(node, ast.Call)):
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


class _Builder:
    def __init__(self, module: nn.Module, function: types.FunctionType):
        self.tree = _parse(function)
        self.globals = function.__globals__
        arguments = copied(self.tree.args)
        names = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        for argument in filter(None, names):
            argument.annotation = None
        self.program = Program(module, function, arguments)
        self.names = {argument.arg: argument.arg for argument in filter(None, names)}
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

    def define(self, variable: str, value: ast.expr, code: ast.expr | None = None) -> ast.Assign:
        statement = self.program.assign(variable, value, code)
        self.program.statements.append(statement)
        self.names[variable] = name_of(statement)
        return statement

    # Statements

    def on_return(self, node: ast.Return) -> None:
        result = self.expression(node.value) if node.value else ast.Constant(None)
        if isinstance(result, ast.BinOp):  # a sum that rules may fuse has a name
            statement = self.program.assign("result", result)
            self.program.statements.append(statement)
            result = ast.Name(name_of(statement), ast.Load())
        self.program.result = result
        self.returned = True

    def on_pass(self, node: ast.Pass) -> None:
        pass

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.on_assign(ast.Assign(targets=[node.target], value=node.value))

    def on_assign(self, node: ast.Assign) -> None:
        value = self.expression(node.value)
        if len(node.targets) > 1:
            statement = self.program.assign("value", value)
            self.program.statements.append(statement)
            value = ast.Name(name_of(statement), ast.Load())
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
            values = value.elts
        else:
            statement = self.program.assign("items", value)
            self.program.statements.append(statement)
            source = name_of(statement)
            values = [
                ast.Subscript(ast.Name(source, ast.Load()), ast.Constant(index), ast.Load())
                for index in range(len(names))
            ]
        defined = [(name, self.program.assign(name, item)) for name, item in zip(names, values, strict=True)]
        for name, statement in defined:
            self.program.statements.append(statement)
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
            self.program.statements.append(ast.Expr(value))
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
        if memory in self.program.arguments_names() or any(self.memory(name) == memory for name in others):
            raise Unsupported("its forward changes a tensor in place that has another name")

    def memory(self, name: str) -> str:
        """The owner of a value's memory, as text. All views of a tensor have the same owner."""
        while True:
            name = self.program.last_name(ast.Name(name, ast.Load())) or name
            value = self.program.definitions.get(name)
            if (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Attribute)
                and value.func.attr in _VIEWS
            ):
                value = value.func.value
            elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
                if isinstance(self.program.definitions.get(value.value.id), ast.Call):
                    return ast.unparse(value)  # one of several results
                value = value.value
            else:
                return name
            if not isinstance(value, ast.Name):
                return ast.unparse(value)
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
            self.define(variable, helper("first_of", ast.Name(self.names[variable], ast.Load())))
            return
        outcome = self.evaluate(node.test)
        if outcome is None:
            self.opaque(node)
        else:
            self.block(node.body if outcome else node.orelse)

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
        for path in _attributes(expression):
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
        assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for variable in sorted(assigned):
            name = self.program.fresh(variable)
            if variable in self.names:
                before = ast.Name(self.names[variable], ast.Load())
                self.program.statements.append(
                    ast.Assign(targets=[ast.Name(name, ast.Store())], value=before)
                )
            self.names[variable] = name
        statement = _Rename(self.names).visit(copied(node))
        self.program.statements.append(statement)
        self.program.inplace.append(statement)
