"""Replacement of functions that a forward calls by name with operators.

A copy of the forward runs, whose names are the file's but for the recognised functions. It has the
code and the decorators of the forward. No name of a file changes; the forward itself runs once one has.
"""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ..basics.code import code_of, names_in
from ..basics.guards import Guards, are_unchanged
from ..basics.report import Done


class InPlace(NamedTuple):
    """Replacement of a function, called as that one is, and the words of a report for it."""

    run: Callable
    done: Done


_EMPTY = types.CellType()
Rule = Callable[[types.FunctionType], InPlace | None]


def with_operators(forward: Callable, rule: Rule) -> tuple[Callable, list[Done]]:
    """(forward with the functions that `rule` recognises replaced, the report's rows for them)."""
    inner: Any = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType):
        return forward, []
    found: dict[str, InPlace] = {}
    for name, function in sorted(inspect.getclosurevars(inner).globals.items()):
        in_place = rule(function) if isinstance(function, types.FunctionType) else None
        if in_place is not None:
            found[name] = in_place
    replaced = tuple((name, in_place.run) for name, in_place in found.items())
    runs = _run_with(forward, replaced, code_of(forward)) if found else None
    if runs is None:
        return forward, []
    return runs, [*dict.fromkeys(in_place.done for in_place in found.values())]


def while_unchanged(function: types.FunctionType, in_place: InPlace, guards: Guards) -> InPlace:
    """A replacement that calls the function once a value that the trial read has changed."""
    kept = guards.kept()
    if not kept.reads:
        return in_place

    @torch.compiler.assume_constant_result
    def holds() -> bool:
        return are_unchanged(kept)

    @functools.wraps(in_place.run)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (in_place.run if holds() else function)(*args, **kwargs)

    return in_place._replace(run=run)


@functools.lru_cache(maxsize=4096)
def _run_with(
    forward: Callable, replaced: tuple[tuple[str, Callable], ...], code: Hashable
) -> Callable | None:
    """A forward that runs with replacements; all layers of a class share it, so it is compiled once.

    Args:
        code: the key of the forward's code, with whose names its copy is made.

    Returns: None for a decorator that cannot be copied, as it does not hold the forward in a closure.
    """
    inner: Any = inspect.unwrap(forward)
    file = inner.__globals__
    names = {name: file[name] for name in names_in(inner) if name in file}
    # Not the name of the file: torch.compile would look the names up there.
    scope = {name: file[name] for name in ("__builtins__", "__package__") if name in file}
    ours = _copy(inner, inner.__closure__, {**scope, **names, **dict(replaced)})
    copied = _decorated(forward, inner, ours)
    if copied is None:
        return None
    with_replacements = copied
    keys, values = (*names,), (*names.values(),)

    @torch.compiler.assume_constant_result
    def holds() -> bool:
        return all(map(operator.is_, map(file.get, keys), values))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (with_replacements if holds() else forward)(*args, **kwargs)

    return run


def _decorated(function: Any, inner: types.FunctionType, ours: types.FunctionType) -> Callable | None:
    """A copy of `function`, which decorates `inner`, around `ours`; None if it has no copy."""
    if function is inner:
        return ours
    wrapped = function.__wrapped__
    copied = _decorated(wrapped, inner, ours)
    cells = getattr(function, "__closure__", None) or ()
    matches = [cell != _EMPTY and cell.cell_contents is wrapped for cell in cells]
    if copied is None or not isinstance(function, types.FunctionType) or matches.count(True) != 1:
        return None
    closure = tuple(
        types.CellType(copied) if is_it else cell for cell, is_it in zip(cells, matches, strict=True)
    )
    result: Any = _copy(function, closure, function.__globals__)
    result.__wrapped__ = copied
    return result


def _copy(function: types.FunctionType, closure: Any, names: dict[str, Any]) -> types.FunctionType:
    """A function of the same code with this closure, which looks these names up."""
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    copied.__qualname__, copied.__doc__ = function.__qualname__, function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied
