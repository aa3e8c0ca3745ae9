"""Guards: the values of all that a computation rests on which stands in the place of a module's own code.

They are what that code read while a trial or a trace ran it, as a `Record` has noted. A rewritten forward
runs while they hold: each name has the value that it had, each module inside has its class, and no hook sees
a module that the code would have called.
"""

import copy
import types
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..upstream.models import RECORDERS, is_recording
from .scoped import having
from .state import MADE, STATE, MadeClass, class_before

PLACES = ("_parameters", "_buffers", "_modules")
MISSING = "<no attribute>"
_PLAIN = (bool, int, float, str, tuple, list, dict, set)
_TENSOR = "<a tensor>"  # its values are read when they are needed
NOWHERE: dict[str, Any] = {}


class Read(NamedTuple):
    """A name that a computation rests on, and its value then.

    Attributes:
        held: the dictionary that had the name: of an object, a class or a file; empty for what is no entry
            of a dictionary, as a property.
        value: `held` itself if the dictionary did not have the name.
        owner: the object that is asked again where the dictionary has another value; None for classes and
            files.
    """

    held: Mapping[str, Any]
    name: str
    value: object
    owner: Any


class Part(NamedTuple):
    """A module whose code ran, or of which code read something.

    Attributes:
        cls: its class, beneath those that stand for another.
        names: of all that was read of it; a class on top of `cls` has none of them.
        is_called: whether hooks would see a call.
    """

    module: nn.Module
    cls: type
    names: frozenset[str]
    is_called: bool


class Kept(NamedTuple):
    """Guards as plain tuples, which Python takes apart faster than named ones.

    Attributes:
        reads: the fields of `Read`s of dictionaries.
        tensors: (dictionary, name) of those of tensors, which may be others.
        others: (owner, name, value) of those of other objects.
        parts: (module, its class now, the other fields) of `Part`s.
        called: the modules of these that were called.
    """

    reads: tuple[tuple, ...] = ()
    tensors: tuple[tuple, ...] = ()
    others: tuple[tuple, ...] = ()
    parts: tuple[tuple, ...] = ()
    called: tuple[nn.Module, ...] = ()


class Guards:
    """A collection of guards.

    Attributes:
        of_misses: whether it has those of what was not recognised, too: that may be once they have changed.
    """

    def __init__(self, of_misses: bool = False) -> None:
        self.of_misses = of_misses
        self.reads: dict[tuple[int, str], Read] = {}
        self.parts: dict[int, Part] = {}

    def add(self, read: Read, of: object) -> None:
        """Adds what was read of a class, a dictionary or another object."""
        self.reads[id(of), read.name] = read

    def add_attribute(self, owner: Any, name: str) -> None:
        """Adds an attribute of an object as it is now: one of its own, or a tensor or a child of a module."""
        attributes = vars(owner)
        if name in attributes:
            self.add(Read(attributes, name, _kept(attributes[name]), owner), attributes)
            return
        if not isinstance(owner, nn.Module):
            self.add(Read(NOWHERE, name, _kept(getattr(owner, name, MISSING)), owner), owner)
            return
        self.add(Read(attributes, name, attributes, None), attributes)  # nothing is written over it
        for place in (attributes[each] for each in PLACES):
            if name in place:
                self.add(Read(place, name, _kept(place[name]), None), place)
                return
        if not hasattr(class_before(owner), name):
            for place in (attributes[each] for each in PLACES):
                self.add(Read(place, name, place, None), place)

    def add_part(self, module: nn.Module, names: Iterable[str], is_called: bool) -> None:
        """Adds a module of which code read names."""
        known = self.parts.get(id(module))
        if known is not None:
            names, is_called = known.names | {*names}, is_called or known.is_called
        self.parts[id(module)] = Part(module, class_before(module), frozenset(names), is_called)

    def merge(self, other: "Guards") -> None:
        """Adds the guards of another collection."""
        self.reads |= other.reads
        for part in other.parts.values():
            self.add_part(part.module, part.names, part.is_called)

    def kept(self) -> Kept:
        """The guards for `holds` to compare."""
        of_dictionaries, tensors, others = list[tuple](), list[tuple](), list[tuple]()
        for read in self.reads.values():
            if read.held is NOWHERE:
                others.append((read.owner, read.name, read.value))
            elif read.owner is None and read.value is _TENSOR:
                tensors.append((read.held, read.name))
            else:
                of_dictionaries.append(tuple(read))
        parts = tuple((part.module, type(part.module), *part[1:]) for part in self.parts.values())
        called = tuple(part.module for part in self.parts.values() if part.is_called)
        return Kept(tuple(of_dictionaries), tuple(tensors), tuple(others), parts, called)


_current: ContextVar[Guards | None] = ContextVar("moe_mps_guards", default=None)


def recording(of_misses: bool = False) -> AbstractContextManager[Guards]:
    """Collects the guards of what is recognised while the context is open, as `Guards` says."""
    return having(_current, Guards(of_misses))


def collection() -> Guards | None:
    """The collection that is open."""
    return _current.get()


# torch.compile asks for an argument that it knows, so this takes the module.
@torch.compiler.assume_constant_result
def holds(module: nn.Module) -> bool:
    """True if all that the rewritten forward rests on is unchanged, and no hook sees what it leaves out."""
    kept: Kept = module.__dict__[STATE].guards
    return are_unchanged(kept, kept.called)


def are_unchanged(kept: Kept, called: tuple[nn.Module, ...] = ()) -> bool:
    """True if names have their values and modules their classes, and no hook sees those that are called."""
    for read in kept[0]:  # runs for each module of a token
        mapping, name, value, _ = read
        if mapping.get(name, mapping) is not value and _has_changed(*read):
            return False
    for mapping, name in kept[1]:
        if not isinstance(mapping.get(name), Tensor):
            return False
    for owner, name, value in kept[2]:
        if (now := getattr(owner, name, MISSING)) is not value and not _is_same(_marked(now), value):
            return False
    for part in kept[3]:
        if type(part[0]) is not part[1] and _is_another(*part):
            return False
    return not called or not is_observed(*called)


def _is_another(module: nn.Module, _: type, cls: type, names: frozenset[str], is_called: bool) -> bool:
    """True if a class of somebody else on top of a module's has something that code would read."""
    for base in type(module).__mro__:
        if base is cls:
            return False
        own = vars(base)
        if MADE not in own and any(name in own for name in names):
            return True
    return True


def is_observed(*modules: nn.Module) -> bool:
    """True if a hook, or a forward that its class did not have, sees or changes what a module does."""
    for module in modules:
        attributes = module.__dict__
        if attributes["_forward_pre_hooks"] or "forward" in attributes:
            return True
        if (hooks := attributes["_forward_hooks"]) and _see(hooks):
            return True
        record: MadeClass | None = getattr(type(module), MADE, None)
        if record is not None and record.original.forward is not record.own:  # the class beneath was patched
            return True
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _see(hooks: dict[int, Any]) -> bool:
    """True if hooks see a call. Those that record stay on their modules, and see what a model collects."""
    return is_recording() or any(getattr(hook, "__module__", None) != RECORDERS for hook in hooks.values())


def first_observed(kept: Kept) -> nn.Module | None:
    """The first module that was called and that a hook, or another forward, sees now."""
    return next((module for module in kept.called if is_observed(module)), None)


def _kept(value: object) -> object:
    """`kept_value`, and a mark for a tensor."""
    return kept_value(_marked(value))


def kept_value(value: object) -> object:
    """A value to compare with: of a container, which code may change, a copy."""
    is_copied = isinstance(value, (list, dict, set)) and type(value).__module__ in ("builtins", "collections")
    return copy.copy(value) if is_copied else value


def _marked(value: object) -> object:
    return _TENSOR if isinstance(value, Tensor) else value


def _has_changed(mapping: Mapping[str, Any], name: str, value: object, owner: Any) -> bool:
    """True if code can tell the value of a name from the one that was read."""
    now = mapping.get(name, mapping)
    if now is value or (value is _TENSOR and isinstance(now, Tensor)):
        return False
    if owner is not None:
        now = _marked(getattr(owner, name, MISSING))
    return not _is_same(now, value)


def _is_same(now: Any, value: Any) -> bool:
    """True if code cannot tell a value from the one that was read."""
    if now is value:
        return True
    if isinstance(now, types.MethodType) and isinstance(value, types.MethodType):
        return now.__func__ is value.__func__ and now.__self__ is value.__self__
    if type(now) is not type(value) or not isinstance(value, _PLAIN):
        return False
    if isinstance(value, dict):
        return [*now] == [*value] and _is_same([*now.values()], [*value.values()])
    if isinstance(value, (tuple, list)):
        return len(now) == len(value) and (all(map(is_, now, value)) or all(map(_is_same, now, value)))
    return bool(now == value)
