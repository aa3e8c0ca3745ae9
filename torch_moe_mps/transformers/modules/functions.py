"""Lets a forward run operators where it calls functions of its file by name.

The forward keeps its code, but for the name of such a function, which becomes one that only our function has
in the globals of the model's file. They stay a plain dictionary: torch.compile reads no other, and whatever
changes there later is seen. While the name stands for the function that was recognised, ours runs. The new
name stays there: all models of a class share the forward that reads it.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..basics.report import Done


class InPlace(NamedTuple):
    """Replacement of a function, called as that one is, and the words of a report for it."""

    run: Callable
    done: Done


Rule = Callable[[types.FunctionType], InPlace | None]


def with_operators(forward: Callable, rule: Rule) -> tuple[Callable, list[Done]]:
    """Returns (forward with the functions that `rule` recognises replaced, the report's rows for them).

    A decorated forward is looked through: its wrappers are copied around the new one.
    """
    *_, inner = _layers(forward)
    if not isinstance(inner, types.FunctionType):
        return forward, []
    replaced, done = [], []
    for name in _global_names(inner.__code__):
        function = inner.__globals__.get(name)
        in_place = rule(function) if isinstance(function, types.FunctionType) else None
        if in_place is not None:
            replaced.append((name, function, in_place.run))
            done.append(in_place.done)
    new = _rebuilt(forward, tuple(replaced)) if replaced else None
    return (forward, []) if new is None else (new, [*dict.fromkeys(done)])


def _layers(function: Any) -> Iterator[Any]:
    """A function, and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and functions in it, read as globals and as nothing else."""
    read: set[str] = set()
    other: set[str] = set()
    for item in _codes(code):
        for instruction in dis.get_instructions(item):
            if instruction.opcode in dis.hasname:
                (read if instruction.opname == "LOAD_GLOBAL" else other).add(instruction.argval)
    return tuple(sorted(read - other))


def names_in(function: Any) -> frozenset[str]:
    """The names of attributes and globals in a function, and in functions within; none where it has no code.

    Source has them too, but takes milliseconds to read, a thousand times as long, and may be missing.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else _names_in(code)


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for item in _codes(code) for name in item.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and the code of functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def _rebuilt(function: Callable, replaced: tuple) -> Callable | None:
    """A function with these (name, function, ours) replaced, None where a wrapper hides its function.

    All layers of a class share the one that is made, so torch.compile compiles it once.
    """
    if not isinstance(function, types.FunctionType):
        return None
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        names = {name: _install(function.__globals__, name, *rest) for name, *rest in replaced}
        return _copy(function, _renamed(function.__code__, names), function.__closure__)
    new = _rebuilt(wrapped, replaced)
    cells = function.__closure__ or ()
    if new is None or not any(_content(cell) is wrapped for cell in cells):
        return None
    closure = tuple(types.CellType(new) if _content(cell) is wrapped else cell for cell in cells)
    copy = _copy(function, function.__code__, closure)
    vars(copy)["__wrapped__"] = new
    return copy


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _copy(function: types.FunctionType, code: types.CodeType, closure: Any) -> types.FunctionType:
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    vars(copy).update(vars(function))
    return copy


def _renamed(code: types.CodeType, names: dict[str, str]) -> types.CodeType:
    constants = (
        _renamed(const, names) if isinstance(const, types.CodeType) else const for const in code.co_consts
    )
    renamed = tuple(names.get(name, name) for name in code.co_names)
    return code.replace(co_names=renamed, co_consts=tuple(constants))


def _install(file: dict[str, Any], name: str, function: types.FunctionType, ours: Callable) -> str:
    """Adds our function to the globals of a file. Returns: its name there."""

    def in_place(*args: Any, **kwargs: Any) -> Any:
        live = NOW  # type: ignore[name-defined]  # noqa: F821  # the value of `name` in the file
        return ours(*args, **kwargs) if live is function else live(*args, **kwargs)

    new = f"_moe_mps_{name}_{id(function):x}"
    code = _renamed(in_place.__code__, {"NOW": name})
    file[new] = types.FunctionType(code, file, new, None, in_place.__closure__)
    return new
