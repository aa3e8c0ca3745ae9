"""Results of trials, kept in the process and in the user's cache folder.

A result holds for the code that ran: a second start tries nothing, unless torch, transformers, this package,
the source of a class or a function that its file names has changed. Code that is not found again by its name,
such as a class inside of a function or a patched method, is remembered in the process alone.
"""

import functools
import hashlib
import inspect
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from ..._environment import CHECK, is_on
from ..._extension import PACKAGE
from ..._faults import is_out_of_memory, raise_fault
from ...selfcheck.machine import cache_folder, read_object, write_object
from ..basics.bounded import Bounded
from ..basics.classes import class_before
from ..basics.state import CLASS_MARK, OUR_FORWARD

if TYPE_CHECKING:  # it takes transformers' quantizers, which ours must come before
    from transformers import PreTrainedModel

_STARTED = time.time()  # a file that was changed since may not be the code that runs
_OWN = "_moe_mps_"  # begins the names that this package adds to the globals of a model's file
_PACKAGES = {"torch", PACKAGE.name, *sys.stdlib_module_names}  # _file() names their versions, or code
_LIBRARIES = [PACKAGE, *(Path(str(library.__file__)).parent for library in (torch, transformers))]
_CONSTANTS = (type(None), bool, int, float, str)
_known = Bounded(512)  # {key: what was found, in a tuple}
_counts = {"tried": 0, "recalled": 0, "out of memory": 0}
_seconds = [0.0]


class _NotKept(Exception):
    """Code is not found again by its name."""


def recall(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """find(), which JSON can hold, once for a key: in this process, and in those that run the same code.

    Nothing is remembered of a trial that ran out of memory.

    Args:
        key: the trial and its inputs: classes, functions, shapes, plain values.
    """
    found = _known.get(key)
    if found is None:
        name = _name(key)
        kept = {} if name is None else read_object(_file)
        if name in kept:
            found = (kept[name],)
            _counts["recalled"] += 1
        else:
            begun, before = time.perf_counter(), _counts["out of memory"]
            found = (find(),)
            raise_fault()
            _seconds[0] += time.perf_counter() - begun
            _counts["tried"] += 1
            if _counts["out of memory"] > before:
                return found[0]
            if name is not None:
                write_object(_file, {**read_object(_file), name: found[0]})
        _known[key] = found
    return found[0]


def recall_of_model(model: "PreTrainedModel", find: Callable[[], Any], trial: Callable) -> Any:
    """find(), once for models of these classes and this config, whatever their weights.

    Args:
        trial: the function whose result it is.
    """
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype")}
    classes = tuple(dict.fromkeys(class_before(module) for module in model.modules()))
    config = json.dumps(values, sort_keys=True, default=str)
    return recall((trial, class_before(model), config, classes), find)


def note_error(error: Exception) -> None:
    """Notes an error that a trial takes for an answer: that memory has run out is none."""
    _counts["out of memory"] += is_out_of_memory(error)


def forget() -> None:
    """Forgets what this process remembers; files stay."""
    _known.clear()


def counted() -> tuple[int, int, float]:
    """Trials that this process ran, those that it found in the file, and the seconds of the former."""
    return _counts["tried"], _counts["recalled"], _seconds[0]


def told(before: tuple[int, int, float]) -> str | None:
    """The report's line on the trials since `counted` gave `before`; None for none."""
    tried, recalled, seconds = (now - then for now, then in zip(counted(), before, strict=True))
    parts = [f"{tried} run ({seconds:.1f} s)"] if tried else []
    parts += [f"{recalled} known from an earlier start"] if recalled else []
    return f"comparisons with the model's own code: {', '.join(parts)}" if parts else None


def _file() -> Path:
    """The results that hold for this torch, transformers, processor and code of this package."""
    key = "\0".join((str(torch.__version__), transformers.__version__, platform.machine(), _own_code()))
    return cache_folder() / f"trials-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@functools.cache
def _own_code() -> str:
    paths = (path for room in ("transformers", "ops") for path in (PACKAGE / room).rglob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _name(key: tuple[Any, ...]) -> str | None:
    """The name of a key in the file; None where nothing is to be kept, or the code is not found again."""
    if not is_on(CHECK):
        return None
    try:
        files = dict[str, None]()
        facts = "\0".join([*_facts(key, files), *chain.from_iterable(map(_globals_of, files))])
    except _NotKept:
        return None
    trial, subject = (getattr(part, "__name__", "") for part in (key[0], key[1]))
    return f"{trial} {subject} {hashlib.sha256(facts.encode()).hexdigest()[:24]}"


def _facts(value: Any, files: dict[str, None]) -> Iterator[str]:
    """The code and values that a key rests on, as text: of classes and functions their source.

    Args:
        files: gets the modules whose globals the methods of modules read.
    """
    if isinstance(value, (*_CONSTANTS, torch.dtype, torch.device)):
        yield f"{type(value).__name__} {value}"
    elif isinstance(value, tuple):
        yield f"{len(value)}("
        for item in value:
            yield from _facts(item, files)
    elif isinstance(value, functools.partial):
        yield from _facts((value.func, value.args, *value.keywords.items()), files)
    elif isinstance(value, type) and OUR_FORWARD in vars(value):
        yield from _facts((getattr(value, OUR_FORWARD), vars(value)[CLASS_MARK]), files)
    elif isinstance(value, type) and issubclass(value, nn.Module):
        for base in value.__mro__:
            if not _has_version(base.__module__):
                files[base.__module__] = None
                yield _home(base)
                yield from map(_home, filter(inspect.isfunction, map(_function, vars(base).values())))
    elif inspect.isroutine(value) or isinstance(value, type):
        yield _home(value)
    else:
        raise _NotKept


def _home(value: Any) -> str:
    """The place of a function or class, and a digest of its file. Raises: _NotKept if it is not there."""
    name, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if name == "builtins" or (name is None and inspect.isbuiltin(value)):  # NoneType is in no module
        return f"builtin {qualname}"
    try:
        found = _function(attrgetter(qualname)(sys.modules[str(name)]))
    except (AttributeError, KeyError):
        raise _NotKept from None
    if found is not value or not all(_is_written_for(layer, str(name)) for layer in _layers(value)):
        raise _NotKept
    return f"{name}.{qualname} {_source_of(str(name))}"


def _layers(function: Any) -> Iterator[Any]:
    """A function, and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_written_for(function: Any, module: str) -> bool:
    """Whether a function is of a module's file, or of a decorator of a library: no patch."""
    if not inspect.isfunction(function):
        return True
    path = Path(inspect.getfile(function))
    return path == Path(sys.modules[module].__file__ or "") or any(map(path.is_relative_to, _LIBRARIES))


def _has_version(module: str) -> bool:
    """True if a version stands for the classes of a module: torch's, and the base classes of all models."""
    package = module.partition(".")[0]
    return package in _PACKAGES or (package == "transformers" and ".models." not in module)


@functools.cache
def _source_of(module: str) -> str:
    """A digest of a module's file; nothing for _PACKAGES."""
    package, path = module.partition(".")[0], getattr(sys.modules[module], "__file__", None)
    if package in _PACKAGES:
        return ""
    if path is None or not Path(path).is_file() or Path(path).stat().st_mtime > _STARTED:
        raise _NotKept
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _function(value: Any) -> Any:
    """The function of a property or a class method; any other value itself."""
    return getattr(value, "fget", getattr(value, "__func__", value))


def _globals_of(module: str) -> tuple[str, ...]:
    """Functions, classes and plain values that a file names: another one may have been put in their place."""
    skipped = ("__", _OWN)
    found = {name: value for name, value in vars(sys.modules[module]).items() if not name.startswith(skipped)}
    routines = {n: v for n, v in found.items() if inspect.isroutine(v) or isinstance(v, type)}
    plain = {n: v for n, v in found.items() if isinstance(v, _CONSTANTS)}
    return *(f"{n} {_home(v)}" for n, v in routines.items()), *(f"{n} {v!r}" for n, v in plain.items())
