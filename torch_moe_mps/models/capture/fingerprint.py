"""Everything that a recorded call of a model rests on, compared in one go before each token.

A recording holds what a library's code did with the model's modules, their attributes, configs, classes and
files; user_code.py keeps others out. All of them are objects of Python, nearly all dictionaries:
csrc/fingerprint.mm compares what those hold; gc.get_referents lists what others hold in one C call. It is not
asked for a dictionary's: from Python 3.13 on it leaves out those of one with the attributes of an object.
"""

import copyreg
import ctypes
import functools
import gc
import inspect
import logging
import sys
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import is_, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from ..._extension import host_library
from ..basics.state import State, UntrackedState
from ..graphs.tracing import NotCapturable
from ..upstream.models import RECORDERS, CacheLayerMixin, GeneralInterface
from ..upstream.reach import hold_reach
from .user_code import is_of_library

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes that every module has, and no forward without gradients reads.
_UNREAD = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
# How often `accelerate` and `restore` have changed what this package keeps in modules.
_changes = 0
# Files whose hooks do nothing but what a recording holds.
_KNOWN_HOOKS = (
    "torch_moe_mps.models.basics.configs",
    "torch_moe_mps.models.caches.cache",
    "torch_moe_mps.models.modules.results",
    RECORDERS,
)
_LEAVES = (
    str, bytes, bool, int, float, complex, type(None), type, property, Tensor, torch.dtype, torch.device,
    torch.Generator, types.ModuleType, types.BuiltinFunctionType, types.CodeType, weakref.ref, logging.Logger,
    State, UntrackedState,
)  # fmt: skip
_CONTAINERS = (dict, list, set, tuple)
_OF_MODULES = ("_parameters", "_buffers", "_modules")  # dictionaries in the attributes of each
# Packages whose files are not watched: their names do not change, but for torch.nn.functional's.
_UNWATCHED = ("torch", "torch_moe_mps", "builtins")


class Fingerprint:
    """The state of a model, and of Python and torch around it, at a recording."""

    def __init__(self, model: nn.Module, exchange: object = None) -> None:
        """`exchange`: an object that changes while nothing of the model does, and has hooks in it."""
        self._reach = hold_reach("transformers")  # or its entries change with the end of another model
        reached = _Reached(model, exchange)
        self.model = model
        self._modules = reached.modules
        inner = reached.modules[1:]  # hooks of the model itself run around the recorded call
        hooks = [getattr(module, name) for module in inner for name in _HOOKS]
        _require_known(hooks, model, exchange)
        classes = dict.fromkeys(cls for item in reached.classes for cls in item.__mro__)
        self._classes = classes  # alive: the end of a cache's class that nobody uses is no change
        self._names = [*_members(classes), *_files(classes)]
        _note_first(classes, (names.container for names in self._names))
        self._copies = [
            (watched, watched.container.copy())
            for watched in reached.watched
            if isinstance(watched.container, (dict, list))
        ]
        every = [*hooks, *(container for _, container in (*self._names, *reached.watched))]
        # Subclasses of dict only while empty: the order of an OrderedDict is no part of its entries.
        entries = [item for item in every if type(item) is dict or (isinstance(item, dict) and not item)]
        known = set(map(id, entries))
        self._entries = _Entries(sorted(entries, key=id))  # in their order in memory
        self._others = _Contents([item for item in every if id(item) not in known])
        self._now = self._around()

    def holds(self) -> bool:
        """True if a call would do the same as the recorded one."""
        try:
            return self._around() == self._now and self._others.are_equal() and self._entries.are_equal()
        except Exception:  # from comparing tensors, arrays or whatever else, which are others now
            return False

    def changed(self) -> str:
        """The path of the first thing that code can tell from what it was, in the model or a library's names.

        "the model" where it is nothing of these.
        """
        for watched, before in self._copies:
            if _differs(watched.container, before):
                found = watched.changed(before)
                if found is not None:
                    return found
        dtype = torch.get_default_dtype()
        if dtype is not self._now[1]:
            return f"torch's default dtype ({dtype})"
        names = {id(each.container): each for each in self._names}
        every = (names[id(now)].changed(old) for now, old in self._entries.changed() if id(now) in names)
        return next((each for each in every if each is not None), "the model")

    def undo(self) -> None:
        """Gives the model's attributes their values at the begin again."""
        for (_, container), before in self._copies:
            if not _differs(container, before):
                continue  # another thread may be reading it
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)

    def _around(self) -> tuple[Any, ...]:
        return list(map(type, self._modules)), torch.get_default_dtype(), _changes


class _Contents:
    """Contents that containers had."""

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers
        # Two tensors of one element may be equal, others cannot be compared.
        self._single = [c for c in containers if any(map(_is_single, self._values(c)))]
        self._now = self._read()

    def are_equal(self) -> bool:
        return all(map(_are_alike, self._read(), self._now))

    def _read(self) -> tuple[list[Any], ...]:
        return list(map(id, self._values(*self._single))), self._values(*self._containers)

    @staticmethod
    def _values(*containers: Any) -> list[Any]:
        return gc.get_referents(*containers)


class _Entries(_Contents):
    """Contents that dictionaries had: the same objects for C++, or equal ones."""

    def __init__(self, dictionaries: list[dict[Any, Any]]) -> None:
        super().__init__(dictionaries)
        entries = chain.from_iterable(map(dict.items, dictionaries))
        self._alive = list(chain.from_iterable(entries))  # nothing else gets their addresses
        self._arrays = (
            array("Q", map(id, dictionaries)),
            array("q", map(len, dictionaries)),
            array("Q", map(id, self._alive)),
        )
        following = ctypes.cast(ctypes.pythonapi.PyDict_Next, ctypes.c_void_p).value
        self._arguments = following, *map(_start_of, self._arrays), len(dictionaries)

    def are_equal(self) -> bool:
        return _comparison()(*self._arguments) or super().are_equal()

    def changed(self) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Dictionaries that hold other objects than they did, each with its former entries."""
        alive = iter(self._alive)
        for container, length in zip(self._containers, self._arrays[1], strict=True):
            entries = islice(alive, 2 * length)
            before = dict(zip(entries, entries, strict=True))
            if _differs(container, before):
                yield container, before

    def _read(self) -> tuple[list[Any], ...]:
        return *super()._read(), list(map(list, self._containers))  # the keys, in their order

    @staticmethod
    def _values(*containers: Any) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, containers)))


@functools.cache
def _comparison() -> Callable[..., bool]:
    """The function of csrc/fingerprint.mm, of four addresses and a count."""
    result: Any = ctypes.PyDLL(str(host_library())).moe_mps_holds
    result.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t]
    result.restype = ctypes.c_bool
    return result


def _start_of(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]


def note_change() -> None:
    """Called when the states of modules change: no fingerprint holds any more."""
    global _changes
    _changes += 1


def _require_known(hooks: list[Any], model: nn.Module, exchange: object) -> None:
    """Raises: NotCapturable for a hook, among these dictionaries, that may do what no recording holds."""
    for hook in gc.get_referents(*hooks):
        if getattr(hook, "__module__", None) in _KNOWN_HOOKS or isinstance(hook, int):  # a key, or True
            continue
        if exchange is not None and getattr(hook, "__self__", None) is exchange:
            continue
        owners = (n for n, m in model.named_modules() if m is not model and _has(m, hook))
        raise NotCapturable(f"a hook of {next(owners, 'a module')} may look at each call")


def _has(module: nn.Module, hook: object) -> bool:
    return any(hook in getattr(module, name).values() for name in _HOOKS)


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() < 2


def _are_alike(now: list[Any], before: list[Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(is_, now, before)) or all(map(_is_alike, now, before))


def _is_alike(now: Any, before: Any) -> bool:
    """True if code cannot tell two values apart: 1 and 1.0 are equal, as are dictionaries in any order."""
    if now is before:
        return True
    if type(now) is not type(before) or now != before:
        return False
    return not isinstance(now, dict) or list(now) == list(before)


def _can_be_told(now: Any, before: Any) -> bool:
    """True if code can tell two values apart; tensors, by being others."""
    if now is before:
        return False
    try:
        return isinstance(now, Tensor) or not _is_alike(now, before)
    except Exception:  # from comparing them
        return True


def _differs(container: Any, before: Any) -> bool:
    return len(container) != len(before) or any(map(is_not, _values(container), _values(before)))


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


class Watched(NamedTuple):
    """An object that may change, and its path from the model."""

    path: str
    container: Any

    def inside(self, key: Any) -> str:
        """The path of a value in a dictionary; a module's dictionaries count as its attributes."""
        if not isinstance(key, str):  # torch's DispatchKey cannot be compared with one
            return f"{self.path}[{key!r}]"
        return self.path if key in _OF_MODULES else f"{self.path}.{key}".removeprefix(".")

    def changed(self, before: Any) -> str | None:
        """The path of the first value that code can tell from the one before; None if there is none."""
        now = self.container
        if not isinstance(before, dict):
            return self.path if len(now) != len(before) or any(map(_can_be_told, now, before)) else None
        for key in {**now, **before}:
            if _can_be_told(now.get(key, self), before.get(key, self)):
                return self.inside(key)
        return None if all(map(is_, now, before)) else self.path


class _Reached:
    """Objects that a model leads to, except through tensors, classes and names that functions look up.

    Attributes:
        watched: objects that may change, modules' first.
        modules: the model, its modules, and unregistered modules in attributes.
        classes: of all objects, and of caches.
    """

    def __init__(self, model: nn.Module, exchange: object) -> None:
        self.modules = list(model.modules())
        self.watched: list[Watched] = []
        self.classes: dict[type, None] = dict.fromkeys(_with_subclasses(Cache, CacheLayerMixin))
        self._seen = {id(exchange)}
        self._waiting: list[Watched] = []
        for name, module in model.named_modules():
            self._add_module(name, module)
        while self._waiting:
            around = self._waiting.pop()
            container = around.container
            if type(container) is dict:
                for key, value in container.items():
                    self._add(around.path, key)
                    self._add(around.inside(key), value)
            else:
                for value in gc.get_referents(container):
                    self._add(around.path, value)

    def _add(self, path: str, value: Any) -> None:
        """Adds an object to the containers that are compared, unless it cannot change or was added before."""
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self.modules.append(value)
            self._add_module(path, value)
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            self._seen.update((id(value.__globals__), id(getattr(value, "__builtins__", None))))
        elif not isinstance(value, _CONTAINERS):
            self.classes[type(value)] = None
            self._add(path, _attributes(value))
        self._watch(path, value)

    def _watch(self, path: str, container: Any) -> None:
        self._waiting.append(Watched(path, container))
        if not isinstance(container, tuple):  # a tuple cannot change
            self.watched.append(self._waiting[-1])

    def _add_module(self, path: str, module: nn.Module) -> None:
        attributes: Any = _attributes(module)
        self.classes[type(module)] = None
        self._seen.update((id(module), id(attributes)))
        self._seen.update(id(attributes[name]) for name in (*_HOOKS, *_UNREAD))
        self._watch(path, attributes)


def _attributes(value: object) -> Any:
    """The dictionary of what an object, a class or a file has by name; None without one."""
    return getattr(value, "__dict__", None)


def _with_subclasses(*classes: type) -> Iterator[type]:
    for cls in classes:
        yield cls
        yield from _with_subclasses(*cls.__subclasses__())


def _members(classes: Iterable[type]) -> Iterator[Watched]:
    """The dictionaries of what classes have by name, which Python shows read-only."""
    for cls in classes:
        for names in gc.get_referents(_attributes(cls)):
            yield Watched(f"{cls.__module__}.{cls.__qualname__}", names)


def _note_first(classes: Iterable[type], files: Iterable[Any]) -> None:
    """Triggers the notes that Python makes in classes and files at their first copy or warning.

    Otherwise the first such call in a process would look like a change.
    """
    for cls in classes:
        copyreg._slotnames(cls)  # type: ignore[attr-defined]  # a function that pickle calls by this name, too
    for file in files:
        if "__file__" in file:
            file.setdefault("__warningregistry__", {})


def _files(classes: Iterable[type]) -> Iterator[Watched]:
    """Names in the files of libraries' classes, and of the functions that they import."""
    names = {cls.__module__ for cls in classes if not _is_of(cls.__module__, _UNWATCHED)}
    packages = tuple({name.partition(".")[0] for name in names})
    of_names = (_attributes(sys.modules.get(name, types)) for name in (*names, functional.__name__))
    files = {id(file): file for file in of_names if is_of_library(file.get("__file__") or "")}
    for file in list(files.values()):
        for value in file.values():
            if isinstance(value, types.FunctionType) and _is_of(value.__module__ or "", packages):
                names_of_file = getattr(inspect.unwrap(value), "__globals__", value.__globals__)
                files.setdefault(id(names_of_file), names_of_file)
    for file in files.values():
        watched = Watched(file["__name__"], file)
        yield watched
        yield from _tables_in(watched)


def _tables_in(file: Watched) -> Iterator[Watched]:
    """Containers at the top level of a file, and the mappings of tables of implementations."""
    for name, value in file.container.items():
        if isinstance(value, GeneralInterface):
            yield from (Watched(file.inside(name), m) for m in (value._global_mapping, value._local_mapping))
        elif type(value) in (dict, list, set) and not name.startswith("__"):
            yield Watched(file.inside(name), value)


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return name.partition(".")[0] in packages
