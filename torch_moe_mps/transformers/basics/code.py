"""Code that a function or a module's class runs: what it reads by name, through the files of models."""

import functools
import inspect
import sys
import types
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from ..._extension import PACKAGE
from .scoped import having

_LIBRARIES = {"torch", "transformers", PACKAGE.name, *sys.stdlib_module_names}
_CONSTANTS = (type(None), bool, int, float, str, bytes)
_MOST_ITEMS = 64  # a larger container is one value
_known: ContextVar[dict[Any, Hashable] | None] = ContextVar("moe_mps_code", default=None)


def unchanged() -> AbstractContextManager[dict[Any, Hashable]]:
    """Context where code does not change: it is read once."""
    return having(_known, {})


def code_of(subject: Any) -> Hashable:
    """Key of the code that a function, or the forward of a class, runs.

    It has functions, classes and other values that the code reads as globals, in closures and as methods, and
    those that functions among them read. Libraries are not followed; models of transformers are.
    """
    known = _known.get()
    if known is None:
        return tuple(_read(subject))
    if subject not in known:
        known[subject] = tuple(_read(subject))
    return known[subject]


def _read(subject: Any) -> Iterator[Hashable]:
    owner = subject if isinstance(subject, type) else None
    waiting, seen = [getattr(subject, "forward", None) if owner else subject], set[Any]()
    yield subject
    while waiting:
        function = _function(waiting.pop())
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        yield function
        waiting += [wrapped for wrapped in (getattr(function, "__wrapped__", None),) if wrapped is not None]
        for name, value in _names_of(function, owner):
            yield name
            yield _key(value)
            waiting.append(value)


def _names_of(function: types.FunctionType, owner: type | None) -> Iterator[tuple[str, Any]]:
    """Pairs (name, value) that a function reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell
            yield name, cell.cell_contents
    if not _is_followed(function.__module__):
        return
    names = names_in(function)
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, value
            if isinstance(value, types.ModuleType) and _is_followed(value.__name__):
                yield from ((each, vars(value)[each]) for each in names if each in vars(value))
        if owner is not None and (value := inspect.getattr_static(owner, name, None)) is not None:
            yield name, value


@functools.cache
def names_in(function: types.FunctionType | types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function, and in functions within.

    Source has them too, but takes milliseconds to read, a thousand times as long, and may be missing.
    """
    code: Any = getattr(function, "__code__", function)
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys(chain(code.co_names, *inner)))


@functools.cache
def _is_followed(module: str | None) -> bool:
    package = (module or "builtins").partition(".")[0]
    return package not in _LIBRARIES or str(module).startswith("transformers.models.")


def _function(value: Any) -> Any:
    """The function of a property, a method or a partial; any other value itself."""
    return getattr(value, "fget", getattr(value, "__func__", getattr(value, "func", value)))


class _Same:
    """Key of an object that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _key(value: Any) -> Hashable:
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return "items", *((_key_of_item(name), _key_of_item(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        return "items", *map(_key_of_item, value)
    return _Same(value)


def _key_of_item(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, _CONSTANTS) else _Same(value)
