"""What a recorded call of a model rests on, compared in one go before each token.

A recording holds what Python did with the model's modules, their attributes, configs, classes and files. All
of them are dictionaries and lists; gc.get_referents lists what thousands of those hold in one C call.
"""

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..rewriting.record import Record
from .tracing import Unsupported

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What every module has besides them, and no forward without gradients reads.
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
_KNOWN_HOOKS = ("torch_moe_mps.transformers.cache", "transformers.utils.output_capturing")
_GLOBAL_HOOKS = tuple(
    value
    for name, value in vars(torch_module).items()
    if name.startswith("_global_") and type(value) is not bool
)
_LEAVES = (
    str, bytes, bool, int, float, complex, type(None), type, property, Tensor, torch.dtype, torch.device,
    torch.Generator, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


class Fingerprint:
    """The state of a model, and of Python and torch around it, at a recording."""

    def __init__(self, model: nn.Module, own: object) -> None:
        """`own`: an object in the model that changes while nothing of the model does."""
        modules = list(model.modules())
        inner = modules[1:]  # hooks of the model itself run around the recorded call
        self._modules = modules
        self._hooks = [module.__dict__[name] for module in inner for name in _HOOKS]
        for hook in gc.get_referents(*self._hooks):
            if getattr(hook, "__module__", None) not in _KNOWN_HOOKS and not isinstance(
                hook, int
            ):  # a key, or True
                owner = next(n for n, m in model.named_modules() if m is not model and _has(m, hook))
                raise Unsupported(f"a hook of {owner} may look at each call")
        attributes = list(_attributes(modules, own))
        self._containers = [*_classes_and_files(modules), *attributes]
        self._copies = [(each, each.copy()) for each in attributes if isinstance(each, (dict, list))]
        # Two tensors of one element may be equal, others cannot be compared.
        self._single = [c for c in attributes if any(_is_single(value) for value in _values(c))]
        self._now = self._state()

    def holds(self) -> bool:
        """Whether a call would do the same as the recorded one."""
        try:
            return self._state() == self._now
        except (RuntimeError, ValueError):  # from comparing tensors or arrays, which are others now
            return False

    def undo(self) -> None:
        """Gives the model's attributes their values at the begin again."""
        for container, before in self._copies:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)

    def _state(self) -> tuple[Any, ...]:
        referents = gc.get_referents
        return (
            list(map(type, self._modules)),
            list(map(id, referents(*self._single))),
            referents(*self._hooks),
            referents(*self._containers),
            torch.get_default_dtype(),
            _changes,
        )


def note_change() -> None:
    """Called when the records of modules change: no fingerprint holds any more."""
    global _changes
    _changes += 1


def forbidden() -> str | None:
    """What around a call keeps it from running as a program; None if nothing does."""
    if torch.is_grad_enabled():
        return "gradients are on: torch.no_grad() lets a token be one call"
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    ):
        return "a mode of torch looks at each operator"
    if any(_GLOBAL_HOOKS):
        return "hooks look at the calls of all modules"
    return None


def _has(module: nn.Module, hook: object) -> bool:
    return any(hook in module.__dict__[name].values() for name in _HOOKS)


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() < 2


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _classes_and_files(modules: list[nn.Module]) -> Iterator[dict[str, Any]]:
    """What the classes of modules, and the files that these are in, have by name."""
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    for cls in classes:
        yield from gc.get_referents(cls.__dict__)  # the dictionary behind the read-only one
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        # A program's own names change while it runs, and torch's files are torch's.
        if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins", "__main__"):
            yield vars(sys.modules[name])
    for interface in (AttentionInterface, AttentionMaskInterface, type(ALL_EXPERTS_FUNCTIONS)):
        yield interface._global_mapping


def _attributes(modules: list[nn.Module], own: object) -> Iterator[Any]:
    """All dictionaries, lists and sets that modules lead to, except through tensors and classes."""
    waiting: list[Any] = [vars(module) for module in modules]
    seen = {id(own), *map(id, modules)}
    seen.update(id(vars(module)[name]) for module in modules for name in (*_HOOKS, *_UNREAD))
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):  # which cannot change
            yield container
        for value in _values(container):
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            if isinstance(value, (dict, list, set, tuple)):
                waiting.append(value)
            elif hasattr(value, "__dict__") and not isinstance(value, Record):
                seen.add(id(value))
                waiting.append(vars(value))
