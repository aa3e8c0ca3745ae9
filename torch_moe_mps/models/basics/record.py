"""Records of what code reads while it runs: attributes, globals, closures, config values and children.

Modules of a replica have recording classes meanwhile, objects in their attributes, as configs, are shown by
stand-ins, and Python reports the functions that run. A record holds paths and names, so that it becomes the
guards of the module that a replica stood for, and of each that is alike. Code of torch, of Python and of this
package counts as fixed. Code that the process runs in between, as finalizers of garbage, does not count. What
no record can hold is refused with a reason.
"""

import contextlib
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..._extension import PACKAGE
from .code import Code, codes_in, function_of, names_in_code
from .guards import MISSING, NOWHERE, PLACES, Guards, Read, are_unchanged, kept_value
from .scoped import having
from .state import STATE, Unsupported, class_before

Path = tuple[str, ...]  # to an object: the names that lead there from the module

_FIXED = frozenset(("torch", PACKAGE.name, "builtins", *sys.stdlib_module_names))
_OF_LIBRARIES = _FIXED | {"transformers"}
_CALLED = "_call_impl"  # the method of a module that runs hooks and its forward
RECORD = "<record>"  # where a module of a replica, and what stands for one, have their record and path
_OF_MODULES = frozenset(vars(nn.Module()).keys() | {STATE, "_compiled_call_impl"}) - {"training"}
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, range, slice, torch.dtype,
    torch.device, torch.Size, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset)
_OF_A_LAYER = {"layer_idx", "training"}  # modules that compute the same differ in them
_LARGEST = 64  # entries of a container that is looked into
# Keys of the dictionary that callbacks of the garbage collector get.
_OF_COLLECTION = {"generation", "collected", "uncollectable"}
# Files of Python that run code which others gave to the process: handlers, finalizers, files at their import.
_OF_PROCESS = {"logging", "warnings", "weakref", "importlib._bootstrap"}


class Record:
    """Attributes that code read, the modules that it called and the functions that ran.

    Attributes:
        refused: what code did that no record holds, for a person; None for nothing.
        shows_tensors: whether the code ran so that each tensor that it read is known.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._names: dict[tuple[Path, str], None] = {}
        self._called: dict[Path, None] = {}
        self._codes: dict[Code, dict[str, Any]] = {}
        self.shows_tensors = False
        self._roots: list[Any] = []
        self._others: dict[type, None] = {}  # classes of modules that code makes itself
        self._shared: dict[tuple[type, ...], Guards] = {}
        self._between: types.FrameType | None = None  # the outermost call of what runs by chance now

    # --- while code runs

    def note(self, path: Path, name: str) -> None:
        """Notes that code reads an attribute of the object at a path."""
        if self._between is None:
            self._names[path, name] = None

    def note_call(self, path: Path) -> None:
        """Notes that code calls the module at a path."""
        if self._between is None:
            self._called[path] = None

    def refuse(self, what: str) -> None:
        """Notes what no record holds."""
        if self._between is None:
            self.refused = self.refused or what

    def look(self, frame: types.FrameType, event: str, argument: object) -> None:
        """Notes the functions that run. Hook for sys.setprofile."""
        if self._between is not None:
            if event == "return" and frame is self._between:
                self._between = None
        elif event == "call" and frame.f_code not in self._codes:
            if _runs_by_chance(frame):
                self._between = frame
                return
            self._codes[frame.f_code] = frame.f_globals
            if not _is_fixed_file(frame.f_globals):
                owner = frame.f_locals.get("self")
                if isinstance(owner, nn.Module) and RECORD not in object.__getattribute__(owner, "__dict__"):
                    self._others[class_before(owner)] = None

    def run(self, function: Callable, *args: Any, **options: Any) -> Any:
        """The result of code of a module, which is the function itself, its object or its first argument."""
        owner = getattr(function, "__self__", None)
        root = next((each for each in (function, owner, *args) if isinstance(each, nn.Module)), None)
        if root is not None and root is owner:
            self.note((), function.__name__)
        if root is None and function not in self._roots:
            self._roots.append(function)
        before = sys.getprofile()
        with contextlib.nullcontext() if root is None else self._showing(root):
            sys.setprofile(self.look)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(before)

    @contextlib.contextmanager
    def _showing(self, root: nn.Module) -> Iterator[None]:
        parts = [(tuple(filter(None, name.split("."))), part) for name, part in root.named_modules()]
        classes: list[Any] = [type(part) for _, part in parts]
        for (path, part), cls in zip(parts, classes, strict=True):
            vars(part)[RECORD] = self, path
            object.__setattr__(part, "__class__", _recording_class(cls))
        try:
            yield
        finally:
            for (_, part), cls in zip(parts, classes, strict=True):
                object.__setattr__(part, "__class__", cls)
                vars(part).pop(RECORD, None)

    # --- afterwards

    def described(self, module: nn.Module) -> tuple:
        """Key of the record's attributes in a module, equal for modules that are alike."""
        owners: dict[Path, Any] = {(): module}
        names = ((path, name) for path, name in self._names if name not in _OF_A_LAYER)
        return tuple(described(look(_at(owners, path), name)) for path, name in names)

    def is_current(self) -> bool:
        """True if classes, files and closures are as they were when the code ran."""
        return all(are_unchanged(guards.kept()) for guards in self._shared.values())

    def guards_of(self, module: nn.Module | None = None) -> Guards:
        """The guards of a module with the code that ran; without one, those of functions.

        Raises: Unsupported for what no record holds.
        """
        guards, owners = Guards(), dict[Path, Any]()
        names_of: dict[Path, set[str]] = {}
        if module is not None:
            owners[()] = module
            names_of = {(): set(), **{path: {"forward"} for path in self._called if path}}
            for path, name in self._names:
                if path or name != "forward":  # the rewritten forward runs in the place of the own one
                    names_of.setdefault(path, set()).add(name)
        classes = dict.fromkeys(self._others, True)
        values: list[Any] = [*self._roots]
        for path, names in names_of.items():
            owner = _at(owners, path)
            if isinstance(owner, nn.Module):
                cls = class_before(owner)
                classes[cls] = classes.get(cls, False) or bool(path and path in self._called)
                values += self._of_module(guards, owner, path, names)
            elif owner is not MISSING:
                for name in names:
                    guards.add_attribute(owner, name)
                    values.append(self._checked(getattr(owner, name, None), (*path, name)))
        if tuple(classes) not in self._shared:
            self._shared[tuple(classes)] = self._of_code(classes, values)
        guards.merge(self._shared[tuple(classes)])
        if self.refused is not None:
            raise Unsupported(self.refused)
        return guards

    def _of_module(self, guards: Guards, owner: nn.Module, path: Path, names: set[str]) -> list[Any]:
        """Values that were read of a module, whose guards are added."""
        attributes, values = vars(owner), []
        guards.add_part(owner, names, bool(path) and path in self._called)
        is_ours = is_fixed(class_before(owner), (PACKAGE.name,))  # it has other state than torch's layer
        for name in names:
            if name == "training":
                if path:
                    guards.add(Read(attributes, name, False, None), attributes)
                continue
            if is_ours and name != "forward":
                continue
            guards.add_attribute(owner, name)
            value = attributes.get(name, MISSING)
            if value is not MISSING:
                values.append(self._checked(value, (*path, name), owner))
        return values

    def _checked(self, value: Any, path: Path, owner: Any = None) -> Any:
        """A value that was read, once guards can compare it."""
        if isinstance(value, types.MethodType) and value.__self__ is owner is not None:
            return value.__func__
        if isinstance(value, Tensor) and self.shows_tensors:
            return value
        if not _is_comparable(value) and not _is_object(value):
            self.refuse(f"its code reads {'.'.join(path)}, a {type(value).__name__} that may change unseen")
        return value

    def _of_code(self, classes: dict[type, bool], values: list[Any]) -> Guards:
        """The guards of classes, files and closures.

        Args:
            classes: {class: whether modules of it were called}.
            values: that were read of modules.
        """
        codes = {code: file for code, file in self._codes.items() if not _is_fixed_file(file)}
        of_code = frozenset[str]().union(*map(names_in_code, codes))
        names = of_code | frozenset(name for _, name in self._names)
        guards = Guards()
        for cls, is_called in classes.items():
            values += (vars(base).get("forward") for base in cls.__mro__)
            is_read = is_called or "forward" in of_code
            values += _of_class(guards, cls, names | {"forward"} if is_read else names - {"forward"})
        for code, file in codes.items():
            self._add_globals(guards, names_in_code(code), file, values)
        self._add_closures(guards, codes, values)
        return guards

    def _add_globals(
        self, guards: Guards, names: Collection[str], file: dict[str, Any], values: list[Any]
    ) -> None:
        """Adds guards of the names that code looks up in a file, and their values to `values`."""
        for name in names:
            if name not in file:
                continue
            value = file[name]
            if isinstance(value, types.ModuleType):
                if not _is_fixed_file(vars(value)):
                    self._add_globals(guards, names, vars(value), values)
                continue
            guards.add(Read(file, name, kept_value(value), None), file)
            values.append(value)
            if isinstance(value, type):
                values += _of_class(guards, value, frozenset(names))
            is_of_library = is_fixed(type(value), _OF_LIBRARIES) and type(value) is not types.SimpleNamespace
            if _is_comparable(value) or is_of_library:  # a logger, a registry: their state is the library's
                continue
            if _is_object(value):  # with all that it has
                attributes = vars(value)
                for each in attributes:
                    guards.add(Read(attributes, each, kept_value(attributes[each]), None), attributes)
            elif not is_fixed(type(value), _OF_LIBRARIES):
                where = file.get("__name__")
                self.refuse(f"its code reads {where}.{name}, a {type(value).__name__} that may change unseen")
        if "functional" in names or any(file.get(name) is functional for name in names):
            _add_functional(guards, names)

    def _add_closures(self, guards: Guards, codes: dict[Code, Any], values: list[Any]) -> None:
        """Adds the values in closures of the functions that ran."""
        waiting, found = [*values], {code for outer in codes for code in codes_in(outer)}
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            function = function_of(value)
            if id(function) in seen:
                continue
            seen.add(id(function))
            if isinstance(value, functools.partial):
                waiting += [*value.args, *value.keywords.values()]
            if isinstance(function, _CONTAINERS) and len(function) <= _LARGEST:
                waiting += function.values() if isinstance(function, dict) else function
            if isinstance(function, types.FunctionType):
                waiting.append(getattr(function, "__wrapped__", None))
                if (code := function.__code__) in codes:
                    found.add(code)
                    waiting += self._add_cells(guards, code.co_freevars, function.__closure__ or ())
        for code in codes:
            if {*code.co_freevars} - {"__class__"} and code not in found:
                self.refuse(f"its code calls {code.co_qualname}, whose closure cannot be found")

    def _add_cells(self, guards: Guards, names: Iterable[str], cells: Iterable[types.CellType]) -> list[Any]:
        """Values in a closure, which are added."""
        values = []
        for name, cell in zip(names, cells, strict=True):
            if cell == types.CellType() or name == "__class__":  # it is empty, or never another one
                continue
            content = cell.cell_contents
            if not _is_comparable(content):
                if is_fixed(type(content), _OF_LIBRARIES) and not isinstance(content, nn.Module):
                    continue
                self.refuse(f"its code has {name} in a closure, a {type(content).__name__}")
            guards.add(Read(NOWHERE, "cell_contents", kept_value(content), cell), cell)
            values.append(content)
        return values


def _add_functional(guards: Guards, names: Collection[str]) -> None:
    """Adds guards of the functions of torch.nn.functional that code looks up."""
    for name in names & vars(functional).keys():
        if not isinstance(value := vars(functional)[name], types.ModuleType):
            guards.add(Read(vars(functional), name, value, None), functional)


_current: ContextVar[Record | None] = ContextVar("moe_mps_record", default=None)


def current() -> Record | None:
    """The record of the trial that runs."""
    return _current.get()


def recording_code() -> AbstractContextManager[Record]:
    """Records code that trials and traces run while the context is open."""
    return having(_current, Record())


def look(owner: Any, name: str) -> Any:
    """A stored attribute, or MISSING: of a module without what its properties compute."""
    if owner is MISSING:
        return MISSING
    if not isinstance(owner, nn.Module):
        return getattr(owner, name, MISSING)
    attributes = vars(owner)
    if name in attributes:
        return attributes[name]
    of_class = next((vars(base)[name] for base in class_before(owner).__mro__ if name in vars(base)), MISSING)
    if of_class is not MISSING:
        return of_class
    return next((attributes[place][name] for place in PLACES if name in attributes[place]), MISSING)


def _of_class(guards: Guards, cls: type, names: frozenset[str]) -> list[Any]:
    """Values of names in a class and its bases, which are added."""
    bases, values = [base for base in cls.__mro__ if not is_fixed(base)], []
    for number, base in enumerate(bases):
        for name in names & vars(base).keys():
            values.append(vars(base)[name])
            guards.add(Read(vars(base), name, kept_value(values[-1]), None), base)
            for front in bases[:number]:
                if name not in (place := vars(front)):
                    guards.add(Read(place, name, place, None), front)
    return values


def _at(owners: dict[Path, Any], path: Path) -> Any:
    """The object at a path; MISSING without one."""
    if path not in owners:
        owners[path] = look(_at(owners, path[:-1]), path[-1])
    return owners[path]


def described(value: Any) -> Any:
    """Key of a value that code read: equal where code sees no difference."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return class_before(value)
    if isinstance(value, functools.partial):
        return functools.partial, described(value.func), described(value.args), described(value.keywords)
    if isinstance(value, dict):
        return type(value), *((described(key), described(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *map(described, value)
    if isinstance(value, types.MethodType):
        return types.MethodType, value.__func__
    return (type(value), value) if isinstance(value, _CONSTANTS) else type(value)


def _is_comparable(value: Any) -> bool:
    """True if guards can tell a value from another one."""
    if isinstance(value, _CONSTANTS):
        return True
    if isinstance(value, functools.partial):
        return all(map(_is_comparable, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, _CONTAINERS):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return is_fixed(type(value)) and all(map(_is_comparable, items))
    if isinstance(value, (Tensor, nn.Module, types.MethodType)):
        return False
    if hasattr(value, "__dict__") and not callable(value):
        return False
    return is_fixed(type(value)) or (type(value).__hash__ is not None and not hasattr(value, "__dict__"))


def _is_object(value: Any) -> bool:
    """True for an object with attributes, as a config."""
    others = (*_CONSTANTS, *_CONTAINERS, Tensor, nn.Module, types.MethodType, functools.partial)
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, others)


def is_fixed(cls: type, packages: Collection[str] = _FIXED) -> bool:
    """True for a class of torch, of Python or of this package, or of other packages."""
    return cls.__module__.partition(".")[0] in packages


def _runs_by_chance(frame: types.FrameType) -> bool:
    """True for a call that Python makes by itself, or for others, and not the code that runs."""
    code, names = frame.f_code, frame.f_globals
    if code.co_name == "__del__" or names.get("__name__") in _OF_PROCESS:
        return True
    arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    last = arguments[-1] if arguments else None
    if isinstance(last, weakref.ref):
        return last() is None  # Python says that what it referred to is gone
    if type(last) is dict:
        return last.keys() == _OF_COLLECTION
    return last is not None and last is frame.f_back  # a handler of signals gets what was interrupted


def _is_fixed_file(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] in _FIXED


@functools.cache
def _recording_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass whose instances note the attributes that are read of them, and refuse what no record holds."""

    def getattribute(self: Any, name: str) -> Any:
        if name in _OF_MODULES or name.startswith("__"):
            if name in PLACES or name == "__dict__":
                _note_all(self, name)
            return cls.__getattribute__(self, name)
        record, path = object.__getattribute__(self, "__dict__")[RECORD]
        if name == _CALLED:
            record.note_call(path)
            return cls.__getattribute__(self, name)
        record.note(path, name)
        value = cls.__getattribute__(self, name)
        return _shown(value, record, (*path, name))

    def setattr_(self: Any, name: str, value: Any) -> None:
        record, path = object.__getattribute__(self, "__dict__")[RECORD]
        record.refuse(f"its code sets {'.'.join((*path, name))}")
        cls.__setattr__(self, name, value)

    members = {
        "__getattribute__": getattribute,
        "__setattr__": setattr_,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), members)


def _note_all(module: Any, name: str) -> None:
    """Notes all entries of a module's dictionary, as a container of modules reads them."""
    caller = sys._getframe(2)
    attributes = object.__getattribute__(module, "__dict__")
    record, path = attributes[RECORD]
    is_torchs = _is_fixed_file(caller.f_globals)
    if name != "__dict__":
        for each in attributes[name]:
            record.note(path, each)
    elif not is_torchs:
        record.refuse(f"its code reads all attributes of {'.'.join(path) or 'the module'}")


class _StandIn:
    """Represents an object that a module has, as a config, and records which attributes are read."""

    def __init__(self, value: Any, record: Record, path: Path) -> None:
        object.__setattr__(self, RECORD, (value, record, path))

    def __getattribute__(self, name: str) -> Any:
        value, record, path = object.__getattribute__(self, RECORD)
        if name.startswith("__"):
            if name == "__dict__":
                record.refuse(f"its code reads all attributes of {'.'.join(path)}")
            return getattr(value, name)
        record.note(path, name)
        cls = type(value)
        of_class = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if isinstance(of_class, (types.FunctionType, property)) and name not in vars(value):
            return of_class.__get__(self, cls)  # its code notes what it reads
        return _shown(getattr(value, name), record, (*path, name))

    def __setattr__(self, name: str, new: Any) -> None:
        value, record, path = object.__getattribute__(self, RECORD)
        record.refuse(f"its code sets {'.'.join((*path, name))}")
        setattr(value, name, new)


def _shown(value: Any, record: Record, path: Path) -> Any:
    """A value as code sees it: a stand-in for an object whose attributes are noted one by one."""
    is_shown = isinstance(value, types.SimpleNamespace) or not is_fixed(type(value))
    return _StandIn(value, record, path) if is_shown and _is_object(value) else value
