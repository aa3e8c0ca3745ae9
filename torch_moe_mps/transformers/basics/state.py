"""The state of this package in a module, which `restore` removes."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .classes import class_beneath

STATE = "_moe_mps"  # where a module's __dict__ has it
PIPELINE = "pipeline"  # where a model's __dict__ has its Running if its layers are spread over processes
REWRITTEN = "rewritten"  # the kind of the classes of rewritten modules
_EAGER: dict[Callable[..., Any], Callable[..., Any]] = {}  # {forward of `with_own`: what runs unmodified}


class Unsupported(Exception):
    """A module cannot be replaced; the message says why."""


class Beside:
    """An object in a model's attributes that changes with each call. No result depends on it."""


class State:
    """Knowledge of a module, kept in its attributes.

    Attributes:
        formula: what the module computes, in the words of the rule that recognised it.
        reads: the attributes that its rewritten forward rests on, None before there is one; of an experts
            module, those that its activation rests on.
        is_attention: the implementation "sdpa" of transformers may be the operator `attention` for it.
        expansion: how an attention layer expands its latents, if few tokens attend to these.
        cache_fault: why the caches that this decoder is called with do not grow in place, if they do not.
        kv_bits: 8 lets the caches that this decoder is called with hold keys and values in 8 bits.
        previous: {attribute of a config: the config, and its value before `accelerate`}.
        joined: the matrix of several linear layers, this one the first.
        captures: of a model's decode steps, None where they are not captured.
    """

    def __init__(self) -> None:
        self.formula: Any = None
        self.reads: tuple | None = None
        self.is_attention = False
        self.expansion: Any = None
        self.cache_fault: str | None = None
        self.kv_bits: int | None = None
        self.previous: dict[str, tuple[Any, str | None]] = {}
        self.joined: Any = None
        self.captures: Any = None


NOTHING = State()  # for modules that have none


def kv_bits_of(model: nn.Module) -> int | None:
    """The kv_bits of a model's decoders, None where it was never given."""
    bits = (state_in(module).kv_bits for module in model.modules())
    return next((number for number in bits if number is not None), None)


def pipeline_of(model: nn.Module) -> Any:
    """The `pipeline.running.Running` of a model that is spread over processes; None for any other."""
    return model.__dict__.get(PIPELINE)  # each captured token asks, and getattr is slow on modules


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before its forward was rewritten; a class that was put on top later stays."""
    return class_beneath(module, REWRITTEN)


def state_in(module: nn.Module) -> State:
    """The state that a module has, to be read alone: `NOTHING` where it has none.

    Forwards of modules, of which a token runs many, look it up themselves: there a call in Python counts.
    """
    state: State = module.__dict__.get(STATE, NOTHING)  # getattr of a missing attribute is slow on modules
    return state


def state_of(module: nn.Module) -> State:
    """The state of a module, made if it has none."""
    own: dict[str, State] = module.__dict__
    if STATE not in own:
        own[STATE] = State()
    return own[STATE]


def with_own(own: Callable) -> Callable[[Callable], Callable]:
    """Decorator of a forward that takes a module's place: `own` runs the module's own code where it has to,
    as that would go wrong alone."""

    def mark(forward: Callable) -> Callable:
        _EAGER[forward] = own
        return forward

    return mark


def own_of(forward: Callable) -> Callable | None:
    """The function that `with_own` gave a forward; None for any other forward."""
    return _EAGER.get(forward)
