"""Formulas as text, matched against what a program computes.

They say what a value is; the forms of `rewrites`, in the same notation, say which code computes it. So casts,
shapes, names and the borders of modules are ignored here, and matter there.
"""

import ast
import functools
from collections.abc import Iterator

from .formulas import BINARY, COMMUTATIVE, Node


@functools.lru_cache(maxsize=1024)
def pattern(text: str) -> Node:
    """A formula as text. Upper-case names stand for any value, the same wherever they occur.

    LAYER(X) is the call of a submodule with one argument: LAYER is bound to the submodule, "LAYER(X)" to the
    result.
    """
    return _pattern(ast.parse(text.strip(), mode="eval").body)


def _pattern(tree: ast.expr) -> Node:
    if isinstance(tree, ast.Name):
        return Node("any", (tree.id,))
    if isinstance(tree, ast.Constant):
        return Node("const", (tree.value,))
    if isinstance(tree, ast.BinOp):
        return Node(BINARY[type(tree.op)], (_pattern(tree.left), _pattern(tree.right)))
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
        return Node("item", (_pattern(tree.value), tree.slice.value))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id.isupper():
        return Node("call", (ast.unparse(tree), tree.func.id, _pattern(tree.args[0])))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        return Node(tree.func.id, tuple(_pattern(a) for a in tree.args))
    raise ValueError(f"not a pattern: {ast.unparse(tree)}")


def match(form: str | Node, node: Node, bound: dict[str, Node] | None = None) -> dict[str, Node] | None:
    """What the upper-case names of a pattern stand for if `node` has its form, else None."""
    form = pattern(form) if isinstance(form, str) else form
    return next(_matches(form, node, bound or {}), None)


def _matches(form: Node, node: Node, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
    if form.op == "any":
        name = form.args[0]
        if name not in bound:
            yield bound | {name: node}
        elif bound[name].key == node.key:
            yield bound
        return
    node = node.peel()
    if form.op == "call":
        if node.op == "module" and len(node.args) == 2:
            whole, name, argument = form.args
            module = Node("attr", node.args[:1])
            yield from _matches(argument, node.args[1], bound | {whole: node, name: module})
        return
    if form.op == node.op and len(form.args) == len(node.args):
        orders = [node.args, node.args[::-1]] if form.op in COMMUTATIVE else [node.args]
        for args in orders:
            yield from _match_all(form.args, args, bound)
    elif node.op == "module" and node.reader and (expanded := node.reader.expand(node)) is not None:
        yield from _matches(form, expanded, bound)


def _match_all(forms: tuple, nodes: tuple, bound: dict[str, Node]) -> Iterator[dict[str, Node]]:
    if not forms:
        yield bound
        return
    first, node = forms[0], nodes[0]
    if isinstance(first, Node) and isinstance(node, Node):
        candidates = _matches(first, node, bound)
    else:
        candidates = iter([bound] if first == node else [])
    for candidate in candidates:
        yield from _match_all(forms[1:], nodes[1:], candidate)
