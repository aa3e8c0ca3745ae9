"""Code that a function or a module's class runs: its members, and the names in the files of models."""

import functools
import re
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.nn import functional

from ..._extension import PACKAGE
from .scoped import Bounded, having

_LIBRARIES = {"torch", "transformers", PACKAGE.name, *sys.stdlib_module_names}
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_CONSTANTS = (type(None), bool, int, float, str, bytes)
ABSENT = object()  # in place of the value of a name that a class does not have
_MOST_ITEMS = 64  # a larger container is one value
_known: ContextVar[dict[Any, Any] | None] = ContextVar("moe_mps_code", default=None)
_keys = Bounded(4096)  # {all that code reads: a small key for it}


def unchanged() -> AbstractContextManager[dict[Any, Any]]:
    """Context that reads each function's code once, as it does not change inside."""
    return having(_known, {})


def code_of(subject: Any) -> Hashable:
    """Key of the code that a function, or the forward of a class, may run.

    It has the members of the class, the values in closures, and all names in the files of these functions and
    of functions that the files import. Libraries are not followed; models of transformers are.
    """
    known = _known.get()
    if known is not None and subject in known:
        return known[subject]
    read = tuple(_read(subject))
    if read not in _keys:
        _keys[read] = object()
    if known is not None:
        known[subject] = _keys[read]
    return _keys[read]


class CodeNames(NamedTuple):
    """Names that code looks up.

    Attributes:
        found: (a class or the names of a file, name, its value there or ABSENT).
        every: those of attributes, too.
    """

    found: tuple[tuple[Any, str, Any], ...]
    every: frozenset[str]


def names_of(cls: type, *methods: str, by_name: bool = True) -> CodeNames:
    """Names that methods of a class, and what these call in files of models, look up outside of instances.

    A name of a library counts as fixed, but for one of torch.nn.functional or in a file of transformers.

    Args:
        by_name: the names of the methods are looked up, too.
    """
    known, key = _known.get(), (names_of, cls, methods, by_name)
    if known is not None and key in known:
        return known[key]
    names = _names_of([*(getattr(cls, name, None) for name in methods)], cls, methods if by_name else ())
    if known is not None:
        known[key] = names
    return names


def names_of_function(function: types.FunctionType) -> CodeNames:
    """Names that a function, and what it calls in files of models, look up."""
    return _names_of([function])


def _names_of(waiting: list[Any], cls: type = object, methods: Iterable[str] = ()) -> CodeNames:
    """Names that functions, and functions of model files that they call, look up in a class or a file."""
    found: dict[tuple[int, str], tuple[Any, str, Any]]
    found = {(id(place), name): (place, name, value) for place, name, value in _in_class(cls, methods)}
    every, seen = set[str](), set[Any]()
    while waiting:
        function = _function(waiting.pop())
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        waiting += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        names, file = names_in(function), function.__globals__
        every |= names
        for place, name, value in (*_in_class(cls, names, ("torch.",)), *_in_file(file, names)):
            if isinstance(value, types.ModuleType):
                continue
            found[id(place), name] = place, name, value
            called = _function(value)
            if isinstance(called, types.FunctionType) and _is_followed(called.__globals__.get("__name__")):
                waiting.append(called)
    return CodeNames((*found.values(),), frozenset(every))


def _in_class(
    cls: type, names: Iterable[str], without: tuple[str, ...] = ()
) -> Iterator[tuple[type, str, Any]]:
    """The names that a class or a base of it has, and the classes in front of that one, which do not."""
    for name in names:
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if owner is not object and not owner.__module__.startswith(without or "-"):
            yield from ((base, name, ABSENT) for base in cls.__mro__[: cls.__mro__.index(owner)])
            yield owner, name, vars(owner)[name]


def _in_file(file: dict[str, Any], names: frozenset[str]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The names that a file of models has, and those of torch.nn.functional where the code reads it."""
    files = []
    if str(file.get("__name__")).partition(".")[0] not in _LIBRARIES - {"transformers"}:
        files.append(file)
    if "functional" in names or any(file.get(name) is functional for name in names):
        files.append(vars(functional))
    return ((place, name, place[name]) for place in files for name in names & place.keys())


def names_in(function: types.FunctionType) -> frozenset[str]:
    """Names that the code of a function, and of functions inside, looks up: globals and attributes."""
    return _names_in_code(function.__code__)


@functools.cache
def _names_in_code(code: types.CodeType) -> frozenset[str]:
    inside = (_names_in_code(item) for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset(code.co_names).union(*inside)


def _read(subject: Any) -> Iterator[Hashable]:
    """The key of code, in parts: functions, constants and names of model files that it reaches."""
    yield subject
    classes = [cls for cls in getattr(subject, "__mro__", ()) if _is_followed(cls.__module__)]
    waiting = [getattr(subject, "forward", None) if isinstance(subject, type) else subject]
    for members in map(vars, classes):
        yield from map(_item, members.items())
        waiting += members.values()
    seen: set[Any] = set()
    while waiting:
        value = _function(waiting.pop())
        if not isinstance(value, (types.FunctionType, types.ModuleType)) or value in seen:
            continue
        seen.add(value)
        file = vars(value)
        if isinstance(value, types.FunctionType):
            yield value
            functional_names = names_in(value) & vars(functional).keys()
            yield from ((name, vars(functional)[name]) for name in functional_names)
            contents = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            yield from map(_key, contents)
            waiting += [*contents, getattr(value, "__wrapped__", None)]
            file = value.__globals__
        if _is_followed(file.get("__name__")) and id(file) not in seen:
            seen.add(id(file))
            names = {name: value for name, value in file.items() if not name.startswith("__")}
            yield from map(_item, names.items())
            waiting += names.values()


@functools.cache
def _is_followed(module: str | None) -> bool:
    name = module or "builtins"
    if name.partition(".")[0] in _LIBRARIES:
        return name.startswith("transformers.models.")
    return not is_installed(getattr(sys.modules.get(name), "__file__", None) or "")


def is_installed(file: str) -> bool:
    """Whether a file lies where packages are installed."""
    return _INSTALLED.search(file) is not None


def _function(value: Any) -> Any:
    """The function of a property, a method or a partial; any other value itself."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, (functools.partial, functools.cached_property)):
        return value.func
    return value


class _Same:
    """Key of an object that equals itself alone, while it is alive."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # a number of another class, a tuple
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value() is other._value() is not None

    def __hash__(self) -> int:
        return self._hash


def _item(item: tuple[str, Any]) -> Hashable:
    return item[0], _key(item[1])


def _key(value: Any) -> Hashable:
    if isinstance(value, dict) and dict.__len__(value) <= _MOST_ITEMS:
        # A subclass is itself, beside what it holds: asked for its items it may import hundreds of modules.
        own = () if type(value) is dict else (_Same(value),)
        return "items", *own, *((_key_of_item(k), _key_of_item(item)) for k, item in dict.items(value))
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        return "items", *map(_key_of_item, value)
    return _key_of_item(value)


def _key_of_item(value: Any) -> Hashable:
    if isinstance(value, _CONSTANTS):
        return type(value), value
    return value if isinstance(value, types.FunctionType) else _Same(value)
