"""The source of models as syntax trees, for what no trace tells: loops over layers, who reads a weight."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator


@functools.lru_cache(maxsize=4096)
def syntax_of(function: Callable) -> ast.stmt | None:
    """The statement that defines a function, not to be changed; None where its source is not available."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None


def names_in(tree: ast.AST, context: type[ast.expr_context] = ast.Load) -> list[str]:
    """The names that a tree reads (Load) or assigns (Store), as often as they occur. x += y does both."""
    nodes = [*ast.walk(tree)]
    if context is ast.Load:
        changed = (node.target for node in nodes if isinstance(node, ast.AugAssign))
        nodes += [ast.Name(each.id, ast.Load()) for each in changed if isinstance(each, ast.Name)]
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))
