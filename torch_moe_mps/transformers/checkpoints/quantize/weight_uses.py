"""Uses of a layer's weight in the code around it that a quantised layer does not allow."""

import ast
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

_READS = "the code around it reads its weight"
_READS_WITHOUT_SOURCE = "the code around it, which has no source, may read its weight"
_ALLOWED = {"dtype", "device", "shape"}  # attributes of a weight that LazyWeight has
_WEIGHT, _CALL = re.compile(r"\.weight\b"), re.compile(r"\b(\w+)\(")


def use_of_weight(cls: type, child: str) -> str | None:
    """The reason to leave a child dense: methods of a class read its weight as LazyWeight does not allow.

    Functions with "cuda" in their names and branches for training never run on quantised layers.
    """
    read, has_source = _weights_read_by(cls)
    return _READS if child in read else None if has_source else _READS_WITHOUT_SOURCE


@functools.cache
def _weights_read_by(cls: type) -> tuple[set[str], bool]:
    """(children whose weights methods read, True if all methods have their source)."""
    read, has_source = set[str](), True
    for name, method in _methods_of(cls):
        source = _source_of(method)
        has_source &= source is not None or name.startswith("__")
        called = {name: method.__globals__.get(name) for name in _CALL.findall(source or "")}
        readers = {name: value for name, value in called.items() if _reads_weight(value)}
        if readers or _WEIGHT.search(source or ""):  # most have none, and to parse them takes long
            nodes = _nodes_of(method)
            read.update(child for child, owner in _children_read(nodes) if owner == "self")
            read.update(_read_by_functions(nodes, readers))
    return read, has_source


def _methods_of(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    for base in cls.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        for name, function in vars(base).items():
            method = inspect.unwrap(function) if inspect.isfunction(function) and "cuda" not in name else None
            if isinstance(method, types.FunctionType):
                yield name, method


@functools.cache
def weights_written_by(cls: type) -> frozenset[str]:
    """Ends of the names of layers whose weights methods of a class change in place: "attention.output"."""
    written: set[str] = set()
    for name, function in vars(cls).items():
        method = inspect.unwrap(function) if inspect.isfunction(function) else None
        if name != "_init_weights" and _reads_weight(method):
            written.update(filter(None, map(_written, (node for node, _ in _nodes_of(method)))))
    return frozenset(written)


def _reads_weight(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and bool(_WEIGHT.search(_source_of(value) or ""))


@functools.cache
def _source_of(function: types.FunctionType) -> str | None:
    try:
        return inspect.getsource(function)
    except OSError:
        return None


Nodes = list[tuple[ast.AST, ast.AST]]  # pairs: a node of a syntax tree, and the one that it stands in


def _nodes_of(function: Any) -> Nodes:
    """The nodes of a function outside of branches for training; none without source."""
    source = _source_of(function) or "pass"
    try:
        return [*_nodes(ast.parse(f"if True:\n{source}" if source[0].isspace() else source))]
    except SyntaxError:  # a lambda in the middle of a line
        return []


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for name, value in ast.iter_fields(tree):
        if name == "body" and isinstance(tree, (ast.If, ast.IfExp)) and _is_training(tree.test):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node, tree
                yield from _nodes(node)


def _is_training(test: ast.expr) -> bool:
    """True if a condition holds in training only."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_training, test.values))
    return isinstance(test, ast.Attribute) and test.attr == "training"


def _path_of_weight(node: ast.AST) -> list[str]:
    """Names from a variable to a weight, ["self", "attention", "output"]; none for any other node."""
    names: list[str] = []
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        inside = node.value
        while isinstance(inside, ast.Attribute):
            names.insert(0, inside.attr)
            inside = inside.value
        return [inside.id if isinstance(inside, ast.Name) else "", *names]
    return []


def _children_read(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """(child, variable) for weights `variable.child.weight` that are read as a whole."""
    for node, around in nodes:
        path = _path_of_weight(node)
        if len(path) == 2 and not _is_allowed(node, around):
            yield path[1], path[0]


def _is_allowed(weight: ast.AST, around: ast.AST) -> bool:
    """True if only the type, an attribute or an element of a weight is read."""
    if isinstance(around, ast.Call):
        return isinstance(around.func, ast.Name) and around.func.id == "isinstance"
    if isinstance(around, ast.Attribute):
        return around.attr in _ALLOWED
    return isinstance(around, ast.Subscript) and around.value is weight


def _read_by_functions(nodes: Nodes, readers: Mapping[str, Any]) -> Iterator[str]:
    """The children that a method hands to functions which read a weight, alone or with the whole module."""
    for call, _ in nodes:
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        if name not in readers:
            continue
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):  # type: ignore[attr-defined]  # a call
            if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
                yield value.attr
            elif ast.unparse(value) == "self":
                yield from (child for child, _ in _children_read(_nodes_of(readers[name])))


def _written(node: ast.AST) -> str:
    """End of the name of the layer in `block.attention.output.weight.div_(2)`; empty for any other node."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_call or not node.func.attr.endswith("_") or node.func.attr.startswith("_"):  # type: ignore[attr-defined]
        return ""
    weight = node.func.value  # type: ignore[attr-defined]  # a call of an attribute
    weight = weight.value if isinstance(weight, ast.Attribute) and weight.attr == "data" else weight
    return ".".join(_path_of_weight(weight)[1:])
