"""Replaces the forward of a module by making its class a subclass; everything else stays.

So hooks, isinstance, state_dict and the module tree are as before. Deepcopy and pickle write the original
class and rewrite the copy, and `restore_module` puts the original class back.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._text import first_line
from ..models.basics.code import code_of
from ..models.basics.guards import Guards, Kept, holds, recording
from ..models.basics.record import recording_code
from ..models.basics.report import Done
from ..models.basics.state import (
    EMPTY_STATE,
    REWRITTEN,
    STATE,
    Unsupported,
    eager_of,
    made_as,
    original_class,
    state_of,
    subclass,
)
from ..models.basics.unmodified import are_slower, eager_is_faster, refusal, why_unmodified
from ..models.caches.separate import by_sequence, reads_a_layer
from ..models.modules.experts import runs_eager
from ..models.modules.functions import InPlace, while_unchanged, with_operators
from ..models.modules.rules import FUNCTION_RULES, MODULE_RULES
from ..models.trials.memory import on_the_cpu, recall
from ..models.upstream.calls import Binder, as_given, cache_name, in_place

# {name of a method: its class's own -> the one that rewritten modules have}
METHODS: dict[str, Callable[[Callable], Callable]] = {}


def is_rewritten(module: nn.Module) -> bool:
    return made_as(type(module), REWRITTEN) is not None


@on_the_cpu()  # for tensors that a model's functions are tried on
def rewrite(module: nn.Module) -> tuple[list[Done], str | None]:
    """Rewrites a module's forward. Returns: what was replaced in it, and why nothing or no more was."""
    done, reason = _rewrite(module)
    # For batches that it reads sequence by sequence, and for methods of a rewritten class.
    if not is_rewritten(module) and (
        reads_a_layer(module) or any(hasattr(type(module), name) for name in METHODS)
    ):
        _run(module, type(module).forward, is_own=True)
    return done, reason


def _rewrite(module: nn.Module) -> tuple[list[Done], str | None]:
    """`rewrite` of a module's forward alone."""
    if is_rewritten(module):
        if not _is_on_top(module):
            return [], "a class was put on top of the one that was rewritten"
        restore_module(module)
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        return [], "its forward was replaced on the instance"
    if (reason := why_unmodified(module)) is not None:
        return [], reason
    try:
        recognised, reason = _recognised(module)
        if recognised is None:
            forward, done, refusals = _with_functions(module)
    except torch.AcceleratorError:  # the GPU has failed, not an operator
        raise
    except RuntimeError as error:  # from an operator that a rule tries, and that fails on this GPU
        return [], first_line(error)
    if recognised is not None:
        forward, done, guards = recognised
        if (refused := refusal(module, done)) is not None:
            return [], refused
        _run(module, forward, guards, yields=are_slower(done))
        return done, None
    if done:
        _run(module, forward, is_own=True)
        return done, next(iter(refusals), reason)
    return [], next(iter(refusals), reason) or "its formula is none of the operators'"


def _recognised(module: nn.Module) -> tuple[tuple[Callable, list[Done], Any] | None, str | None]:
    """(forward, what it runs, what it rests on) by the first rule that knows a module, and the last
    reason of a rule that refuses it."""
    reason = None
    for recognise in MODULE_RULES:
        try:
            with recording() as guards:
                result = recognise(module)
        except Unsupported as unsupported:
            reason = str(unsupported)
            continue
        if result is not None:
            return (*result, guards), None
    return None, reason


def _with_functions(module: nn.Module) -> tuple[Callable, list[Done], list[str]]:
    """The module's forward with operators in the place of functions, what they are, and which are refused."""
    refusals: list[str] = []

    def in_place(function: types.FunctionType) -> InPlace | None:
        try:
            result = _in_place(function)
        except Unsupported as error:
            refusals.append(str(error))
            return None
        refused = None if result is None else refusal(module, [result.done])
        if refused is not None:
            refusals.append(refused)
        return result if refused is None else None

    return *with_operators(original_class(module).forward, in_place), refusals


def _in_place(function: types.FunctionType) -> InPlace | None:
    """Replacement of a function. Raises: Unsupported if no trial reached a branch of it."""

    def find() -> tuple[InPlace | None, str | None]:
        try:
            for rule in FUNCTION_RULES:
                with recording_code() as record:
                    found = rule(function)
                if found is not None:
                    return while_unchanged(function, found, record.guards_of()), None
        except Unsupported as error:
            return None, str(error)
        return None, None

    found, missing = recall((_in_place, code_of(function)), find)
    if missing is not None:
        raise Unsupported(missing)
    return found


def _is_on_top(module: nn.Module) -> bool:
    """True if the rewritten class is the module's: a parametrisation, FSDP2 or a user may subclass it."""
    return original_class(module) is not type(module)


def restore_module(module: nn.Module) -> None:
    """Restores a module's state before `rewrite`; a class put on top keeps running the original forward."""
    drop_forward_of_class(module)
    if _is_on_top(module):
        _set_class(module, original_class(module))
    module.__dict__.pop(STATE, None)


def restore_modules(model: nn.Module) -> None:
    """Restores all modules of a model."""
    for module in model.modules():
        restore_module(module)


def drop_forwards_of_classes(model: nn.Module) -> None:
    """Drops forwards of instances that are their classes', in all modules of a model."""
    for module in model.modules():
        drop_forward_of_class(module)


def drop_forward_of_class(module: nn.Module) -> None:
    """Drops a forward of the instance that is its class's, as hooks of the accelerate library leave it."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, types.MethodType) and forward == types.MethodType(type(module).forward, module):
        del module.__dict__["forward"]


def _run(
    module: nn.Module,
    forward: Callable,
    guards: Guards | None = None,
    is_own: bool = False,
    yields: bool = False,
) -> None:
    """Installs a replaced forward on a module, valid while the guards hold.

    Args:
        is_own: True if the forward is the original one with some called functions replaced.
        yields: True to run the original forward on a CPU, which is faster there.
    """
    state = state_of(module)
    cls: type = type(module)
    _set_class(module, _rewritten_class(cls, forward, is_own, yields))
    state.guards = Kept() if guards is None else guards.kept()  # its class is now the one that is compared


def runs_with_cache(module: nn.Module) -> bool:
    """True if a module's forward, original or replaced, takes a cache."""
    record = made_as(type(module), REWRITTEN)
    forwards: list[Any] = [type(module).forward] if record is None else [record.own, record.ours]
    return any(map(cache_name, forwards))


def run_as(copied: nn.Module, module: nn.Module) -> None:
    """Makes a copy of a rewritten module run the same replaced forward."""
    state_of(copied).guards = Kept()
    _set_class(copied, type(module))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    module.__class__ = cls
    if "_old_forward" in module.__dict__:  # the accelerate library calls this one between its hooks
        module.__dict__["_old_forward"] = types.MethodType(cls.forward, module)


@functools.cache
def _rewritten_class(
    original: type[nn.Module], rewritten: Callable, is_own: bool, yields: bool
) -> type[nn.Module]:
    """The subclass of `original` that runs `rewritten` in inference and the original forward otherwise."""
    original_forward = original.forward
    replaced = eager_of(rewritten)
    eager = original_forward if replaced is None else in_place(original_forward, replaced)
    bound = as_given if is_own else Binder(original_forward, rewritten)

    @functools.wraps(original_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if original.forward is not original_forward:  # somebody has patched the class
            return original.forward(self, *args, **kwargs)
        # A module without a state was restored, and a wrapper that a user put on before still calls this.
        # FSDP2, a parametrisation or a user may have put a class on top, which knows the original forward.
        state = self.__dict__.get(STATE, EMPTY_STATE)
        if (
            type(self) is not cls
            or state.guards is None
            or (yields and eager_is_faster(args or kwargs.values()))
        ):
            return original_forward(self, *args, **kwargs)
        if not holds(self) or runs_eager(self, *args, *kwargs.values()):
            return eager(self, *args, **kwargs)
        arguments = bound(args, kwargs)
        result = NotImplemented if arguments is None else rewritten(self, *arguments[0], **arguments[1])
        return eager(self, *args, **kwargs) if result is NotImplemented else result

    batched = forward if cache_name(original_forward) is None else by_sequence(forward)
    cls = subclass(original, REWRITTEN, _copy_class, rewritten, forward=batched, **_methods(original))
    return cls


def _methods(original: type[nn.Module]) -> dict[str, Callable]:
    """Methods of rewritten modules of a class. If somebody patches the class, they call what it has then."""

    def method(name: str, original_method: Callable) -> Callable:
        ours = METHODS[name](original_method)

        @functools.wraps(original_method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            now = getattr(original, name)
            return (ours if now is original_method else now)(self, *args, **kwargs)

        return call

    return {name: method(name, getattr(original, name)) for name in METHODS if hasattr(original, name)}


@functools.cache
def _copy_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of an empty module that is rewritten once its state has been set."""

    def resume(self: nn.Module, state: Any) -> None:
        self.__class__ = original
        self.__setstate__(state)
        rewrite(self)

    return type(original.__name__, (original,), {"__setstate__": resume, "__module__": original.__module__})
