"""Replacement of functions that a forward calls by name with operators.

The name of a recognised function stands for a switch from then on: it calls that function, or the operator
while a forward runs that has one in its place. Forwards keep their code and decorators, other models of the
file are unaffected, and a later patch of the name takes effect.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..basics.code import STANDS_FOR, names_of_function
from ..basics.report import Done
from ..basics.state import are_unchanged, kept, reads_of


class InPlace(NamedTuple):
    """Replacement of a function, called as that one is, and the words of a report for it."""

    run: Callable
    done: Done


Rule = Callable[[types.FunctionType], InPlace | None]


class _Running(threading.local):
    """The replacements of functions in the forward that a thread runs: torch.compile reads these."""

    replacements: Mapping[Callable, Callable] = {}


_running = _Running()


def with_operators(forward: Callable, rule: Rule) -> tuple[Callable, list[Done]]:
    """Returns (forward with the functions that `rule` recognises replaced, the report's rows for them)."""
    inner: Any = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType):
        return forward, []
    found: dict[types.FunctionType, InPlace] = {}
    for name, function in sorted(inspect.getclosurevars(inner).globals.items()):
        if not isinstance(function, types.FunctionType):
            continue
        function = STANDS_FOR.get(function, function)
        in_place = rule(function)
        if in_place is not None:
            found[function] = in_place
            inner.__globals__[name] = _switch(function)
    if not found:
        return forward, []
    runs = _run_with(forward, tuple((function, in_place.run) for function, in_place in found.items()))
    return runs, [*dict.fromkeys(in_place.done for in_place in found.values())]


def while_unchanged(function: types.FunctionType, in_place: InPlace) -> InPlace:
    """A replacement that calls the function once a name that it looks up has another value."""
    reads = kept(reads_of(names_of_function(function)))
    if not reads:
        return in_place

    @torch.compiler.assume_constant_result
    def holds() -> bool:
        return are_unchanged(reads)

    @functools.wraps(in_place.run)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (in_place.run if holds() else function)(*args, **kwargs)

    return in_place._replace(run=run)


@functools.cache
def _switch(function: types.FunctionType) -> types.FunctionType:
    """The function that stands for another one in its file."""

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return _running.replacements.get(function, function)(*args, **kwargs)

    switch: Any = chosen
    STANDS_FOR[switch] = function
    return switch


@functools.lru_cache(maxsize=4096)
def _run_with(forward: Callable, replaced: tuple[tuple[Callable, Callable], ...]) -> Callable:
    """A forward that runs with replacements; all layers of a class share it, so it is compiled once."""
    replacements = dict(replaced)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, _running.replacements = _running.replacements, replacements
        try:
            return forward(*args, **kwargs)
        finally:
            _running.replacements = before

    return run
