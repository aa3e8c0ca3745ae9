"""Operators that a module computes: its own forward, recorded on fake tensors.

No source is read, so it does not matter how a forward is written, decorated or inherited. The forward runs on
a stand-in for the module: without hooks, in evaluation mode, with fake tensors for parameters and buffers.
The stand-in records which attributes are read, as the formula depends on them, and nothing can be written
to it.
"""

import contextlib
import copy
import enum
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..basics.code import code_of
from ..basics.guards import MISSING, PLACES
from ..basics.record import RECORD, Path, Record, current
from ..basics.scoped import Bounded
from ..basics.sizes import Decisions
from ..basics.state import original_class
from ..graphs.nodes import memory_of, written
from ..graphs.passes.simplify import drop_unused, make_new_tensors, share_equal, share_views
from ..graphs.patterns import uncast
from ..graphs.tracing import Recorder, is_operator
from ..trials.memory import apart, note_error, recall_alike
from .linears import LazyWeight, QuantizedLinear

Found = TypeVar("Found")
Sizes = tuple[int, ...]
PATH = "path"  # key of node.meta: the dotted name of the parameter that a node stands for

_TENSORS = ("_parameters", "_buffers")
_OF_MODULES = vars(nn.Module()).keys() | {"__dict__"}
_FIXED = {"training": False, "_compiled_call_impl": None}
_CONSTANTS = (type(None), bool, int, float, str, enum.Enum, type, torch.dtype, torch.device)
_CLASSES = 1024  # modules that differ from outside, of which results are remembered

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Traced(NamedTuple):
    """Results of a forward for its inputs: nodes in place of tensors. Nothing in the graph is written."""

    result: Any
    inputs: tuple[fx.Node, ...]
    graph: fx.Graph


class Input(NamedTuple):
    """A tensor to trace with; with `is_wide`, the module decides its last size."""

    sizes: Sizes
    dtype: torch.dtype = torch.float32
    is_wide: bool = True


# Sizes that modules are traced with, in front of the last one, which a module decides. No code decides by the
# others (`Decisions`), so large primes stand for every number. 1 is apart, as torch's operators treat it so.
_ROWS = 10_007, 10_009, 10_037
SIZES: tuple[Sizes, ...] = (_ROWS[:1], (1, 1), _ROWS[:2], _ROWS)
RANKS = range(2, 5)  # dimensions that inputs then have
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Refused(Exception):
    """A forward reads or writes what a trace cannot follow."""


def trace(
    module: nn.Module,
    *inputs: Input,
    function: Callable | None = None,
    weights: torch.dtype | None = None,
    writes: bool = False,
) -> Traced | None:
    """Traces a module's forward, or another function of it, with its parameters in another dtype if given.

    Args:
        writes: True to trace code that writes into tensors that it made, too.

    Returns None if the forward raises, changes an input, decides by a size that is not the module's own, or
    uses more of the module than attributes, parameters and children.
    """
    record = current() or Record()
    record.shows_tensors = True
    recorder = Recorder(record.look)
    decisions = Decisions(_own_sizes(module, inputs))
    watch = _Watch(recorder, record, weights)
    like = torch.empty(0, device=_device_of(module))
    fakes = [recorder.input(like, item.sizes, item.dtype) for item in inputs]
    try:
        with apart(), _silently(), decisions:
            function = function or original_class(module).forward
            results, form = pytree.tree_flatten(
                recorder.run(lambda: function(watch.stand_in(module, ()), *fakes))
            )
        places = [place for place, item in enumerate(results) if isinstance(item, Tensor)]
        nodes = tuple(map(recorder.node_of, fakes))
        recorder.finish([results[place] for place in places])
    except Exception as error:  # it is not ours: any error may come of it
        note_error(error)
        return None
    graph = recorder.graph
    # Aliases first: a tensor that another one shows is not made new.
    for simplify in (drop_unused, share_views, drop_unused, make_new_tensors, share_views, share_equal):
        simplify(graph)
    drop_unused(graph)
    if watch.is_refused or decisions.were_made or _writes(graph, writes):
        return None
    returned: Any = graph.output_node().args[0]
    for place, node in zip(places, returned, strict=True):
        results[place] = node
    return Traced(pytree.tree_unflatten(results, form), nodes, graph)


def _writes(graph: fx.Graph, into_inputs: bool) -> bool:
    """True if a trace writes into tensors, or `into_inputs`: into tensors that it has not made."""
    calls = (node for node in graph.nodes if hasattr(node.target, "_schema"))
    into = [memory_of(item) for node in calls for item in written(node)]
    return any(not is_operator(item) for item in into) if into_inputs else bool(into)


def _own_sizes(module: nn.Module, inputs: Iterable["Input"]) -> set[int]:
    """Sizes of a module's tensors, and the widths of its inputs."""
    tensors = (item for part in module.modules() for place in _TENSORS for item in vars(part)[place].values())
    sizes = {size for item in tensors if item is not None for size in item.shape}
    return sizes | {item.sizes[-1] for item in inputs if item.is_wide}


def _device_of(module: nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Operators that fail on fake tensors are not logged."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = was_disabled


class _Watch:
    """Shows a forward a module's attributes, and notes the ones that it reads."""

    def __init__(self, recorder: Recorder, record: Record, dtype: torch.dtype | None):
        self.recorder, self.record = recorder, record
        self.dtype = dtype
        self.is_refused = False
        self._stand_ins: dict[Path, Any] = {}

    def refuse(self, what: str) -> Any:
        self.is_refused = True  # the forward may catch the error
        raise _Refused(what)

    def read(self, owner: Any, path: Path, name: str) -> Any:
        """An attribute of a module, or of an object that it has."""
        self.record.note(path, name)
        value = _look(owner, name)
        if value is MISSING:
            raise AttributeError(name)
        return self.stand_in(value, (*path, name))

    def stand_in(self, value: Any, path: Path) -> Any:
        """Value that a forward sees in place of a real one."""
        if _is_constant(value):
            return copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        if path not in self._stand_ins:
            self._stand_ins[path] = self._made(value, path)
        return self._stand_ins[path]

    def _made(self, value: Any, path: Path) -> Any:
        if isinstance(value, (Tensor, LazyWeight)):
            return self._fake(value, path)
        if isinstance(value, nn.Module):
            cls: type = _class_of(value)
            stand_in: Any = object.__new__(_class_of_stand_in(cls))
            object.__getattribute__(stand_in, "__dict__")[RECORD] = value, self, path
            return stand_in
        if hasattr(value, "__dict__") and not callable(value):
            return _Object(value, self, path)
        return self.refuse(f"a {type(value).__name__}")

    def _fake(self, value: Tensor | LazyWeight, path: Path) -> Tensor:
        dtype = self.dtype if self.dtype is not None and value.dtype.is_floating_point else value.dtype
        like = value if isinstance(value, Tensor) else torch.empty(0, device=value.device)
        fake = self.recorder.input(like, tuple(value.shape), dtype)
        self.recorder.node_of(fake).meta[PATH] = ".".join(path)
        return fake


class _Object:
    """Stands for an object that a module has, as a config."""

    def __init__(self, real: Any, watch: _Watch, path: Path):
        vars(self)[RECORD] = real, watch, path

    def __getattr__(self, name: str) -> Any:
        real, watch, path = vars(self)[RECORD]
        return watch.read(real, path, name)

    def _refuse(self, *args: Any) -> Any:
        return vars(self)[RECORD][1].refuse("what an object is, or a change of it")

    __setattr__ = __delattr__ = __eq__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@functools.cache
def _class_of_stand_in(cls: type[nn.Module]) -> type:
    """Subclass whose instances read attributes of a real module, noting each, and refuse changes."""

    def getattribute(self: Any, name: str) -> Any:
        real, watch, path = object.__getattribute__(self, "__dict__")[RECORD]
        if name in _FIXED:
            if name == "training":
                watch.record.note(path, name)
            return _FIXED[name]
        if name in _OF_MODULES:
            return watch.refuse(name)
        is_own = name in vars(real) and name != "forward"
        if not is_own and hasattr(type(_of_class(cls, name)), "__get__"):  # a method, a property
            if name != "_call_impl":
                watch.record.note(path, name)
            return object.__getattribute__(self, name)
        return watch.read(real, path, name)

    def getattr_(self: Any, name: str) -> Any:
        if cls.__getattr__ is nn.Module.__getattr__:  # it looks where `read` has looked
            raise AttributeError(f"'{cls.__name__}' object has no attribute '{name}'")
        return cls.__getattr__(self, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _, watch, path = object.__getattribute__(self, "__dict__")[RECORD]
        watch.record.note_call(path)
        return self.forward(*args, **kwargs)

    def refuse(self: Any, *args: Any) -> Any:
        return object.__getattribute__(self, "__dict__")[RECORD][1].refuse("a change of the module")

    members = {
        "__getattribute__": getattribute,
        "__getattr__": getattr_,
        "__setattr__": refuse,
        "__delattr__": refuse,
        "_call_impl": call,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), members)


def _class_of(module: nn.Module) -> type[nn.Module]:
    """The class whose forward is recorded: a quantised layer computes what its dense one would."""
    return nn.Linear if type(module) is QuantizedLinear else original_class(module)


def _of_class(cls: type, name: str) -> Any:
    return next((vars(item)[name] for item in cls.__mro__ if name in vars(item)), MISSING)


def _look(owner: Any, name: str) -> Any:
    """A stored attribute, or MISSING."""
    if not isinstance(owner, nn.Module):
        return getattr(owner, name, MISSING)
    if type(owner) is QuantizedLinear and name == "weight":
        return owner.weight
    attributes = vars(owner)
    value = attributes[name] if name in attributes else _of_class(_class_of(owner), name)
    places = PLACES if value is MISSING else ()
    return next((attributes[place][name] for place in places if name in attributes[place]), value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, chain.from_iterable(value.items())))
    if isinstance(value, functools.partial):
        return _is_constant(_parts(value))
    is_function = isinstance(value, types.FunctionType) and value.__closure__ is None
    return is_function or isinstance(value, (*_CONSTANTS, types.BuiltinFunctionType))


def _parts(value: functools.partial) -> tuple:
    return value.func, value.args, *value.keywords.items()


def _described(value: Any) -> Any:
    """Key of a value: two modules with equal keys have the same trace."""
    if isinstance(value, (Tensor, LazyWeight)):
        return tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, nn.Module):
        return code_of(original_class(value))
    if isinstance(value, functools.partial) and _is_constant(value):
        return _parts(value)
    is_container = isinstance(value, (list, dict))
    return type(value), (copy.deepcopy(value) if is_container else value) if _is_constant(value) else None


def attribute_of(module: nn.Module, name: str) -> Any:
    """An attribute of a module that a remembered result depends on; None without it."""
    if (record := current()) is not None:
        record.note((), name)
    value = _look(module, name)
    return None if value is MISSING else value


def path_of(value: Any) -> str | None:
    """The path of the tensor of the module that an argument is, before casts and other shapes."""
    value = uncast(value)
    return value.meta.get(PATH) if isinstance(value, fx.Node) else None


def names_of_inputs(module: nn.Module) -> tuple[str, ...] | None:
    """Names of a forward's arguments; None where one cannot be given by its place."""
    arguments = [*inspect.signature(original_class(module).forward).parameters.values()][1:]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        tuple(argument.name for argument in arguments)
        if all(argument.kind in by_place for argument in arguments)
        else None
    )


# Results that are remembered


def everywhere(
    ask: Callable[[Sizes, torch.dtype], Found | None],
    shapes: tuple[Sizes, ...] = SIZES,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Found | None:
    """Result that inputs of all these shapes and dtypes share; None if they differ in it."""
    result = ask(shapes[0], dtypes[0])
    if result is None:  # most modules are such
        return None
    others = [ask(shape, dtypes[0]) for shape in shapes[1:]]
    others += [ask(shapes[0], dtype) for dtype in dtypes[1:]]
    return result if all(other == result for other in others) else None


def remembered(find: Callable[[nn.Module], Found]) -> Callable[[nn.Module], Found]:
    """`find`, which asks traces, once for all modules that are alike: of one class, and in all that was read.

    Besides traces and `attribute_of` it may only ask for names, shapes and dtypes of the module's own
    tensors, and for names and classes of its children.
    """
    known = Bounded(_CLASSES)

    @functools.wraps(find)
    def ask(module: nn.Module) -> Found:
        found: Found = recall_alike(_outside(module), module, lambda: find(module), known)
        return found

    return ask


def _outside(module: nn.Module) -> tuple:
    attributes = ((name, _described(item)) for place in PLACES for name, item in vars(module)[place].items())
    return code_of(original_class(module)), *attributes
