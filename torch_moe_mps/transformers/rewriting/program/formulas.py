"""Formulas of a straight-line program in a canonical form.

However a value is written, it is read as one tree of operations: functions and methods of torch have one
name, arguments one order, in-place and out-of-place are the same, and calls of submodules and helper methods
are expanded. Casts and changes of shape are transparent: the operators compute in float32 and on rows, so
such a difference is only one of rounding.
"""

import ast
import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..reads import record
from .programs import Program, Unsupported, calls_in, copied
from .straightening import attributes_in, straighten

_OF_ONE = ("sigmoid", "silu", "square", "rsqrt", "exp", "softplus", "zeros_like")
# Operations by name: the parameters in order. A dimension must be the last one.
_PARAMETERS = {
    **dict.fromkeys(_OF_ONE, ("input",)),
    "softmax": ("input", "dim", "dtype"),
    "topk": ("input", "k", "dim", "largest", "sorted"),
    "gather": ("input", "dim", "index"),
    "sum": ("input", "dim", "keepdim"),
    "mean": ("input", "dim", "keepdim"),
    "max": ("input", "dim"),
    "amax": ("input", "dim"),
    "clamp": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "pow": ("input", "exponent"),
    "scatter_": ("input", "dim", "index", "value"),
    "masked_fill": ("input", "mask", "value"),
    "chunk": ("input", "chunks", "dim"),
}
_CLAMPS: dict[tuple[str, ...], str] = {("input", "min"): "clamp_min", ("input", "max"): "clamp_max"}
_IGNORED = {"dtype", "keepdim", "sorted"}
_LAST_DIMENSION = {ast.dump(ast.parse(text, mode="eval").body) for text in ("-1", "1")}
_FUNCTIONS = {
    getattr(namespace, name): name
    for namespace in (F, torch)
    for name in _PARAMETERS
    if hasattr(namespace, name)
}
_CASTS = {"float", "to", "type", "type_as", "detach", "double", "half", "bfloat16", "bool"}
_SHAPES = {"view", "reshape", "unsqueeze", "squeeze", "expand", "flatten", "contiguous"}
_TRANSPARENT = {"cast", "shape"}
# What the expressions that functions are found by consist of: reading these has no effect.
_READABLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
_NUMBER = (int, float, str)  # what float() takes
BINARY = {ast.Add: "add", ast.Mult: "mul", ast.Sub: "sub", ast.Div: "div", ast.Pow: "pow"}
COMMUTATIVE = {"add", "mul"}
# Modules that are one operation, by the name of their class.
MODULES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "Sigmoid": "sigmoid",
    "SqrtSoftplusActivation": "sqrtsoftplus",
    "Softmax": "softmax",
}


@dataclass(frozen=True)
class Node:
    """An operation and its arguments (nodes or plain values); `source` is the program's expression for it."""

    op: str
    args: tuple
    source: ast.expr | None = field(default=None, compare=False, repr=False)
    reader: "Reader | None" = field(default=None, compare=False, repr=False)

    def peel(self) -> "Node":
        node = self
        while node.op in _TRANSPARENT:
            node = node.args[0]
        return node

    @functools.cached_property
    def key(self) -> tuple:
        """What two nodes share that compute the same value."""
        node = self.peel()
        return (node.op, *(a.key if isinstance(a, Node) else a for a in node.args))

    @property
    def path(self) -> str:
        """Where the module has what an attribute reads or a submodule's call runs."""
        whole: str = self.args[0]
        return whole.removeprefix("self.")

    def text(self) -> str:
        return ast.unparse(self.source) if self.source is not None else self.op


def operation_of(module: object) -> str | None:
    """The operation that an activation module or function is."""
    if isinstance(module, nn.Softmax) and module.dim not in (-1, 1):
        return None
    if isinstance(module, nn.Module):
        known = type(module).__module__.partition(".")[0] in ("torch", "transformers")
        exact = not isinstance(module, nn.GELU)
        return MODULES.get(type(module).__name__) if known and exact else None
    try:
        return _FUNCTIONS.get(module)
    except TypeError:
        return None


class _Owner(ast.NodeTransformer):
    """`self` as the path of a submodule."""

    def __init__(self, path: str):
        self.path = ast.parse(path, mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copied(self.path) if node.id == "self" else node


class Reader:
    """Reads a program's expressions as nodes; `prefix` is the module's path, `arguments` its arguments."""

    def __init__(self, program: Program, prefix: str = "self", arguments: dict[str, Node] | None = None):
        self.program = program
        self.prefix = prefix
        self.arguments = arguments or {}
        self.names: dict[str, Node] = {}

    def result(self) -> Node:
        return self.read(self.program.result)

    def read(self, value: ast.expr) -> Node:
        method = getattr(self, f"read_{type(value).__name__.lower()}", self.opaque)
        return method(value)

    def make(self, op: str, args: tuple, value: ast.expr) -> Node:
        return Node(op, args, self.source(value), self)

    def source(self, value: ast.expr) -> ast.expr | None:
        """The expression in terms of the outermost program; what comes from an argument has none."""
        if self.prefix == "self":
            return value
        if {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} - {"self"}:
            return None
        return _Owner(self.prefix).visit(copied(value))

    def opaque(self, value: ast.expr) -> Node:
        return self.make("opaque", (f"{self.prefix}:{ast.dump(value)}",), value)

    def read_name(self, value: ast.Name) -> Node:
        name = value.id
        if name in self.arguments:
            return self.arguments[name]
        if name not in self.names:
            definition = self.program.definitions.get(name)
            if definition is None:
                self.names[name] = self.opaque(value)
            else:
                node = self.read(definition)
                self.names[name] = Node(
                    node.op, node.args, value if self.prefix == "self" else None, node.reader
                )
        return self.names[name]

    def read_constant(self, value: ast.Constant) -> Node:
        return self.make("const", (value.value,), value)

    def read_tuple(self, value: ast.Tuple) -> Node:
        return self.make("tuple", tuple(self.read(item) for item in value.elts), value)

    def read_unaryop(self, value: ast.UnaryOp) -> Node:
        operand = self.read(value.operand)
        if isinstance(value.op, ast.USub) and operand.op == "const":
            return self.make("const", (-operand.args[0],), value)
        names = {ast.USub: "neg", ast.Invert: "not_"}
        return self.make(names.get(type(value.op), "opaque"), (operand,), value)

    def read_binop(self, value: ast.BinOp) -> Node:
        op = BINARY.get(type(value.op))
        if op is None:
            return self.opaque(value)
        left, right = self.read(value.left), self.read(value.right)
        if op == "pow":
            return self.power(left, right, value)
        return self.make(op, (left, right), value)

    def power(self, base: Node, exponent: Node, value: ast.expr) -> Node:
        named = {2: "square", -0.5: "rsqrt"}.get(exponent.args[0]) if exponent.op == "const" else None
        return self.make(named, (base,), value) if named else self.make("pow", (base, exponent), value)

    def read_attribute(self, value: ast.Attribute) -> Node:
        path = ast.unparse(value)
        if path.startswith("self."):
            return self.make("attr", (self.prefix + path[4:],), value)
        index = {"values": 0, "indices": 1}.get(value.attr)
        if index is not None:
            return self.item(self.read(value.value), index, value)
        return self.opaque(value)

    def item(self, of: Node, index: int, value: ast.expr) -> Node:
        if of.op == "tuple":
            return of.args[index]
        if of.op == "max" and index == 0:
            return self.make("amax", of.args, value)
        return self.make("item", (of, index), value)

    def read_subscript(self, value: ast.Subscript) -> Node:
        of = self.read(value.value)
        if isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, int):
            return self.item(of, value.slice.value, value)
        every_other = {"..., ::2": 0, "..., 0::2": 0, "..., 1::2": 1}.get(
            ast.unparse(value.slice).strip("()")
        )
        if every_other is not None:
            return self.make("every_other", (of, every_other), value)
        if isinstance(value.slice, ast.Name):
            return self.make("index", (of, self.read(value.slice)), value)
        return self.opaque(value)

    # Calls

    def read_call(self, value: ast.Call) -> Node:
        callee = self.resolve(value.func)
        number = value.args[0].value if value.args and isinstance(value.args[0], ast.Constant) else None
        if callee is float and isinstance(number, _NUMBER):
            return self.make("const", (float(number),), value)
        if isinstance(callee, nn.Module):
            return self.read_module(callee, value)
        if isinstance(callee, types.MethodType) and callee.__self__ is self.program.module:
            return self.read_method(callee.__func__, value)
        name = operation_of(callee)
        if name is not None:
            self.record(value.func)
            return self.operation(name, value.args, value)
        of_tensor = isinstance(getattr(callee, "__self__", None), Tensor)
        if (callee is None or of_tensor) and isinstance(value.func, ast.Attribute):
            return self.tensor_method(value.func.attr, [value.func.value, *value.args], value)
        return self.opaque(value)

    def resolve(self, function: ast.expr) -> object:
        """The object that names and attributes stand for, if it depends on the module alone."""
        nodes = list(ast.walk(function))
        if not all(isinstance(node, _READABLE) for node in nodes):
            return None
        names = {node.id for node in nodes if isinstance(node, ast.Name)} - {"self"}
        if names & (self.program.definitions.keys() | self.program.arguments_names()):
            return None
        try:
            return eval(
                ast.unparse(function), self.program.function.__globals__, {"self": self.program.module}
            )
        except Exception:
            return None

    def record(self, function: ast.expr) -> None:
        """Notes the attributes that a function was found by."""
        for path in attributes_in(function):
            record(self.program.module, path)

    def read_module(self, module: nn.Module, value: ast.Call) -> Node:
        name = operation_of(module)
        if name is not None and len(value.args) == 1 and not value.keywords:
            self.record(value.func)
            return self.make(name, (self.read(value.args[0]),), value)
        path = self.prefix + ast.unparse(value.func)[4:]
        if not path.startswith(self.prefix + ".") or "[" in path:
            return self.opaque(value)
        if any(isinstance(a, ast.Starred) for a in value.args) or any(k.arg is None for k in value.keywords):
            return self.opaque(value)
        arguments = [self.read(a) for a in value.args] + [self.read(k.value) for k in value.keywords]
        return self.make("module", (path, *arguments), value)

    def expand(self, node: Node) -> Node | None:
        """A call of a submodule as the formula of its forward."""
        path, *arguments = node.args
        record(self.program.module, path[len(self.prefix) + 1 :])
        module = self.program.module.get_submodule(path[len(self.prefix) + 1 :])
        try:
            return inline(straighten(module), path, arguments)
        except Unsupported:
            return None

    def read_method(self, function: Any, value: ast.Call) -> Node:
        try:
            program = straighten(self.program.module, function)
            return inline(program, self.prefix, [self.read(a) for a in value.args])
        except (Unsupported, AttributeError):
            return self.opaque(value)

    def tensor_method(self, name: str, args: list[ast.expr], value: ast.Call) -> Node:
        if name in _CASTS:
            texts = [ast.unparse(a) for a in (*args[1:], *(k.value for k in value.keywords))]
            to_float = name == "float" or any(text in ("torch.float32", "torch.float") for text in texts)
            return self.make("cast", (self.read(args[0]), "float32" if to_float else "other"), value)
        if name in _SHAPES:
            if name in ("view", "reshape") and len(args) == 4:
                return self.make("grouped", (self.read(args[0]), self.read(args[2])), value)
            return self.make("shape", (self.read(args[0]),), value)
        if name in _PARAMETERS:
            return self.operation(name, args, value)
        return self.opaque(value)

    def operation(self, name: str, args: list[ast.expr], value: ast.Call) -> Node:
        """A known operation, with the arguments that matter in one order."""
        parameters = _PARAMETERS[name]
        given = dict(zip(parameters, args, strict=False)) | {k.arg: k.value for k in value.keywords}
        if name == "scatter_" and "src" in given:
            given["value"] = given.pop("src")
        known = len(args) <= len(parameters) and given.keys() <= set(parameters)
        if not known or ("dim" in given and ast.dump(given.pop("dim")) not in _LAST_DIMENSION):
            return self.opaque(value)
        casts = "dtype" in given and ast.unparse(given["dtype"]) in ("torch.float32", "torch.float")
        nodes = {p: self.read(given[p]) for p in parameters if p in given and p not in _IGNORED}
        nodes = {p: node for p, node in nodes.items() if node.op != "const" or node.args[0] is not None}
        if name == "clamp":
            name = _CLAMPS.get(tuple(nodes), name)
        if name == "pow":
            return self.power(nodes["input"], nodes["exponent"], value)
        if casts:
            nodes["input"] = Node("cast", (nodes["input"], "float32"), None, self)
        return self.make(name, tuple(nodes.values()), value)


def result_of(module: nn.Module) -> Node | None:
    """What the forward of a module computes; None without a program."""
    try:
        return Reader(straighten(module)).result()
    except Unsupported:
        return None


def inline(program: Program, prefix: str, arguments: list[Node]) -> Node:
    """The result of a submodule's or method's program for the given arguments."""
    parameters = [a.arg for a in program.arguments.args if a.arg != "self"]
    return Reader(program, prefix, dict(zip(parameters, arguments, strict=False))).result()


def evaluate(node: Node | None, module: nn.Module) -> object:
    """The value of a node that depends on the module's attributes alone, else None."""
    if node is None:
        return None
    if node.op == "const":
        return node.args[0]
    if node.op == "attr":
        record(module, node.args[0].partition(".")[2])
        value: object = module
        for name in node.args[0].split(".")[1:]:
            value = getattr(value, name, None)
        return value
    return None


def child(node: Node | None, module: nn.Module) -> nn.Module | None:
    """The submodule that a node stands for."""
    return None if node is None or node.op != "attr" else module.get_submodule(node.path)


def is_argument(node: Node) -> bool:
    """Whether a node is what the forward was called with, unchanged."""
    return node.op == "opaque" and isinstance(node.source, ast.Name)


def is_number(node: Node, module: nn.Module) -> bool:
    value = evaluate(node, module)
    return isinstance(value, (int, float)) and not isinstance(value, (bool, Tensor))


def named(node: Node) -> Node:
    """The value that the program has a name for, beneath casts where there is one."""
    best = node
    while node.op in _TRANSPARENT:
        node = node.args[0]
        if isinstance(node.source, ast.Name) or best.source is None:
            best = node
    return best


def casts_to_float32(node: Node, until: Node) -> bool:
    """Whether the formula from `until` to `node` passes through float32."""
    if node.key == until.key and (node.op not in _TRANSPARENT or node.text() == until.text()):
        return False
    if node.op == "cast" and node.args[1] == "float32":
        return True
    return any(isinstance(a, Node) and casts_to_float32(a, until) for a in node.args)


_EFFECTLESS = {*_PARAMETERS, *_CASTS, *_SHAPES, "iadd", "isub", "imul", "itruediv", "size"}
_EFFECTLESS |= {"linear", "split", "transpose"}


def is_pure(value: ast.expr, module: nn.Module) -> bool:
    """Whether an expression in a forward of `module` has no effect, so that it can be dropped if not read."""
    for call in calls_in(value):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        if _is_of_a_module(module, owner):
            if not _is_pure_module(module, f"{owner}.{name}".removeprefix("self.")):
                return False
        elif name not in _EFFECTLESS:
            return False
    return True


def _is_of_a_module(module: nn.Module, owner: str) -> bool:
    """Whether an expression is `self` or a module in it."""
    value: Any = module
    for name in owner.split(".")[1:]:
        value = getattr(value, name, None)
    return owner.partition(".")[0] == "self" and isinstance(value, nn.Module)


def _is_pure_module(module: nn.Module, path: str) -> bool:
    try:
        submodule = module.get_submodule(path)
        program = straighten(submodule)
    except (AttributeError, Unsupported):
        return False
    statements = all(isinstance(s, ast.Assign) and is_pure(s.value, submodule) for s in program.statements)
    return statements and not program.inplace and is_pure(program.result, submodule)
