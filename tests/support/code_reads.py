"""What eager code reads, as the instructions of Python show it, and changes of it one by one.

The tracer shares nothing with the package: it follows `self.name`, `self.config.name` and globals from
instruction to instruction while a model runs.
"""

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

FIXED = {"torch", "torch_moe_mps", "builtins", *sys.stdlib_module_names}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
FORWARDS = ("forward", "map", "reduce")  # what operators take the place of
_SELF = ("LOAD_FAST", "LOAD_FAST_BORROW")


def is_fixed(file: dict[str, Any]) -> bool:
    return str(file.get("__name__")).partition(".")[0] in FIXED


@functools.cache
def _reads_at(code: types.CodeType) -> dict[int, tuple[str, tuple[str, ...]]]:
    """{offset of an instruction: ("self", names that lead to what it reads) or ("global", (name,))}."""
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    chain: tuple[str, ...] | None = None
    for item in dis.get_instructions(code):
        if item.opname in _SELF:
            chain = () if item.argval == "self" else None
        elif item.opname in _ATTRIBUTES and chain is not None:
            chain = (*chain, item.argval)
            found[item.offset] = "self", chain
        elif item.opname == "LOAD_GLOBAL":
            chain = None
            found[item.offset] = "global", (item.argval,)
        else:
            chain = None
    return found


class Tracer:
    """Reads of the code that runs in its block.

    Attributes:
        attributes: {(module, names that lead from it): modules whose forward it was read below}.
        names: (globals of a file, name), by the id of the first.
    """

    def __init__(self) -> None:
        self.attributes: dict[tuple[nn.Module, tuple[str, ...]], set[nn.Module]] = {}
        self.names: dict[tuple[int, str], dict[str, Any]] = {}

    def __enter__(self) -> "Tracer":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if is_fixed(frame.f_globals):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        owners, outer = set[nn.Module](), frame
        while outer is not None:
            owner = outer.f_locals.get("self") if outer.f_code.co_name in FORWARDS else None
            owners |= {owner} if isinstance(owner, nn.Module) else set()
            outer = outer.f_back  # type: ignore[assignment]
        return functools.partial(self._look, owners)

    def _look(self, owners: set[nn.Module], frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            kind, names = _reads_at(frame.f_code).get(frame.f_lasti, ("", ()))
            if kind == "global" and names[0] in frame.f_globals:
                self.names[id(frame.f_globals), names[0]] = frame.f_globals
            elif kind == "self" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
                self.attributes.setdefault((owner, names), set()).update(owners)
        return functools.partial(self._look, owners)


# --- changes


def twice(result: Any) -> Any:
    """A result with its first tensor of floats doubled."""
    if isinstance(result, torch.Tensor):
        return 2 * result if result.is_floating_point() else result
    if isinstance(result, (tuple, list)) and result:
        first, *others = result
        return type(result)([twice(first), *others]) if type(result) in (tuple, list) else result
    return result


class Twice(nn.Module):
    """A module with its result doubled, and its other attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **options: Any) -> Any:
        return twice(self.inner(*args, **options))


OF_CLASS = "method of a class"  # a change that both models see
Change = Callable[[nn.Module], Callable[[], None]]  # a model -> what undoes the change


def other_value(value: Any) -> Any:
    """Another value of the same kind; the value itself where there is none."""
    if isinstance(value, bool):
        return not value
    if type(value) is int:
        return value - 1 if value > 1 else value + 1
    if type(value) is float:
        return value / 4 if value else 0.5
    return value


def changes(model: nn.Module, path: str, names: tuple[str, ...]) -> Iterator[tuple[str, Change]]:
    """(what it is, change) for each way in which what names lead to can be another one."""
    module, (*between, name) = model.get_submodule(path), names
    owner: Any = module
    for each in between:
        owner = getattr(owner, each, None)
    if owner is None or (between and isinstance(owner, (nn.Module, torch.Tensor))):
        return  # a module's own reads are its own rows
    if between and (callable(owner) or not hasattr(owner, "__dict__")):
        return
    of_class = next((vars(base)[name] for base in type(module).__mro__ if name in vars(base)), None)
    if name in module._modules and not between:
        if module._modules[name] is not None:
            yield "hook", lambda m: _hooked(m.get_submodule(path)._modules[name])
            yield "child", lambda m: _put(m.get_submodule(path)._modules, name, Twice)
    elif name in module._parameters or name in module._buffers:
        places = "_parameters" if name in module._parameters else "_buffers"
        if (
            not between
            and (tensor := getattr(module, places)[name]) is not None
            and tensor.is_floating_point()
        ):
            yield "tensor", lambda m: _put(getattr(m.get_submodule(path), places), name, _doubled)
    elif isinstance(of_class, types.FunctionType) and not between:
        yield "method of an instance", lambda m: _set(m.get_submodule(path), name, _calling_twice)
        cls = next(base for base in type(module).__mro__ if name in vars(base))
        if not is_fixed({"__name__": cls.__module__}):
            yield OF_CLASS, lambda _: _set_in_class(cls, name)
    elif isinstance(value := getattr(owner, name, 0.5), (bool, int, float)):
        if not hasattr(owner, name) or other_value(value) != value:
            yield "value", lambda m: _set(_follow(m.get_submodule(path), between), name, other_value)
    elif isinstance(value, types.FunctionType):
        yield "function", lambda m: _set(m.get_submodule(path), name, _calling_twice)


def change_of_global(file: dict[str, Any], name: str) -> Change | None:
    """The change of a function or number that a file has; None for anything else."""
    value = file[name]
    if isinstance(value, types.FunctionType):
        return lambda _: _put(file, name, _calling_twice)
    if isinstance(value, (bool, int, float)):
        return lambda _: _put(file, name, other_value)
    return None


def _follow(owner: Any, names: list[str]) -> Any:
    for name in names:
        owner = getattr(owner, name)
    return owner


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(2 * tensor.detach(), False) if isinstance(tensor, nn.Parameter) else 2 * tensor


def _calling_twice(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return twice(function(*args, **options))

    return call


def _put(place: Any, name: str, made: Callable[[Any], Any]) -> Callable[[], None]:
    before = place[name]
    place[name] = made(before)
    return lambda: place.__setitem__(name, before)


def _set(owner: Any, name: str, made: Callable[[Any], Any]) -> Callable[[], None]:
    had, before = name in vars(owner), getattr(owner, name, 0.5)
    setattr(owner, name, made(before))
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


def _set_in_class(cls: type, name: str) -> Callable[[], None]:
    before = vars(cls)[name]
    setattr(cls, name, _calling_twice(before))
    return lambda: setattr(cls, name, before)


def _hooked(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_hook(lambda module, args, result: twice(result)).remove
