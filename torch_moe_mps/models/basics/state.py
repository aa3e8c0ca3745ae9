"""Knowledge of modules: how their classes were made, and their state.

Subclasses take the place of a module's class: its name and documentation stay, and copies are of the class
itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

KVBits = int | str  # kv_bits of a cache: 4, "k4v2", 8 or 16

MADE = "_moe_mps_made"  # the attribute of a class that `subclass` made: its MadeClass


class MadeClass(NamedTuple):
    """Record of a class that was made.

    Attributes:
        kind: of the classes that stand for others.
        class_of_copies: gives the class of the empty module that a copy or a pickle begins with, from
            `original`.
        original: the class in whose place it is.
        own: the forward that this one had when the class was made.
        ours: the forward that a rewritten module runs; None for other kinds.
    """

    kind: str
    class_of_copies: Callable[[type], type]
    original: type[nn.Module]
    own: Callable[..., Any]
    ours: Callable[..., Any] | None


def subclass(
    original: type[nn.Module],
    kind: str,
    class_of_copies: Callable[[type], type],
    ours: Callable[..., Any] | None = None,
    **members: Any,
) -> type[nn.Module]:
    """The subclass of `original` with these members. The other arguments are fields of its `MadeClass`."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        if type(self) is not cls:  # a class on top has its own way, or none
            return reduced
        return _copy_of, (class_of_copies, _recipe(original)), *reduced[2:]

    names = ("__module__", "__qualname__", "__doc__")
    members |= {name: getattr(original, name) for name in names}
    members |= {
        "__reduce_ex__": reduce,
        MADE: MadeClass(kind, class_of_copies, original, original.forward, ours),
    }
    cls: type[nn.Module] = type(original.__name__, (original,), members)
    return cls


def made_as(cls: type, kind: str) -> MadeClass | None:
    """Record of a class, or of its first base, that was made as this kind; None if none was."""
    every = (vars(base).get(MADE) for base in cls.__mro__)
    return next((record for record in every if record is not None and record.kind == kind), None)


def class_beneath(module: nn.Module, kind: str) -> type[nn.Module]:
    """The class of a module without one of this kind; beneath a class of somebody else it stays."""
    return _without(type(module), kind)


def _without(cls: type[nn.Module], kind: str) -> type[nn.Module]:
    """A class without the generated one of this kind, wherever it lies beneath others."""
    record: MadeClass | None = vars(cls).get(MADE)
    if record is None or record.kind == kind:
        return cls if record is None else record.original
    beneath = _without(record.original, kind)
    return cls if beneath is record.original else record.class_of_copies(beneath)


def restore_class(module: nn.Module, kind: str) -> None:
    """Gives a module the class without one of this kind; beneath a class of somebody else it stays."""
    if (beneath := class_beneath(module, kind)) is not type(module):
        module.__class__ = beneath


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class of a module beneath all that `subclass` made. A class on top of them stays."""
    cls = type(module)
    while MADE in vars(cls):
        cls = vars(cls)[MADE].original
    return cls


def is_on_top(cls: type[nn.Module]) -> bool:
    """True for another package's or a user's class on top of a class that `subclass` made."""
    return MADE not in vars(cls) and any(MADE in vars(base) for base in cls.__mro__)


def _recipe(cls: type[nn.Module]) -> Any:
    """A class as a pickle names it; generated ones as (factory, recipe of the base)."""
    record: MadeClass | None = vars(cls).get(MADE)
    return cls if record is None else (record.class_of_copies, _recipe(record.original))


def _class_of(recipe: Any) -> type[nn.Module]:
    return recipe if isinstance(recipe, type) else recipe[0](_class_of(recipe[1]))


def _copy_of(class_of_copies: Callable[[type], type], recipe: Any) -> nn.Module:
    cls: Any = class_of_copies(_class_of(recipe))
    return cls.__new__(cls)


STATE = "_moe_mps"  # where a module's __dict__ has it
PIPELINE = "pipeline"  # where a model's __dict__ has its Running if its layers are spread over processes
REWRITTEN = "rewritten"  # the kind of the classes of rewritten modules
_EAGER: dict[Callable[..., Any], Callable[..., Any]] = {}  # {forward of `with_eager`: what runs unmodified}


class Unsupported(Exception):
    """A module cannot be replaced; the message says why."""


class UntrackedState:
    """An object in a model's attributes that changes with each call. No result depends on it."""


class ExpertAdapter(NamedTuple):
    """Factors of a stack of experts, as expert_lora takes them."""

    a: Tensor
    b: Tensor
    experts: int
    scaling: float


class State:
    """Knowledge of a module, kept in its attributes.

    Attributes:
        formula: what the module computes, in the words of the rule that recognised it.
        guards: what its rewritten forward rests on, None before there is one; of an experts module, what its
            activation rests on.
        is_attention: the implementation "sdpa" of transformers may be the operator `cached_attention` for it.
        reach: what keeps the rows of `upstream/reach.py` in that such a layer needs.
        expansion: how an attention layer expands its latents, if few tokens attend to these.
        adapters: of a call of quantised experts: {projection: adapters of its stack}.
        kv_bits: of keys and values in the caches that this decoder is called with, as in `accelerate`.
        joined: the matrix of several linear layers, this one the first.
        captures: of a model's decode steps, None where they are not captured.
        folder: of the revision of a model, whose config has its name on the Hub alone; None without one.
        overrides: of the recipe by which a model was quantised, for MTP layers that are read later.
    """

    def __init__(self) -> None:
        self.formula: Any = None
        self.guards: Any = None
        self.is_attention = False
        self.reach: Any = None
        self.expansion: Any = None
        self.adapters: dict[str, list[ExpertAdapter]] = {}
        self.kv_bits: KVBits | None = None
        self.joined: Any = None
        self.captures: Any = None
        self.folder: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are recognised anew: the names that code looks up are of this process."""
        return vars(self) | {"guards": None}


EMPTY_STATE = State()  # for modules that have none


def kv_bits_of(model: nn.Module) -> KVBits | None:
    """The kv_bits of a model's decoders, None if never set."""
    bits = (state_in(module).kv_bits for module in model.modules())
    return next((number for number in bits if number is not None), None)


def pipeline_of(model: nn.Module) -> Any:
    """The `pipeline.running.Running` of a model that is spread over processes; None for any other."""
    return model.__dict__.get(PIPELINE)  # each captured token asks, and getattr is slow on modules


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before its forward was rewritten; a class that was put on top later stays."""
    return class_beneath(module, REWRITTEN)


def state_in(module: nn.Module) -> State:
    """Read-only state of a module; `EMPTY_STATE` if it has none.

    A token runs many modules, so their forwards look it up themselves: a call in Python counts there.
    """
    # getattr of a missing attribute is slow on modules
    state: State = module.__dict__.get(STATE, EMPTY_STATE)
    return state


def state_of(module: nn.Module) -> State:
    """The state of a module, made if it has none."""
    attributes: dict[str, State] = module.__dict__
    if STATE not in attributes:
        attributes[STATE] = State()
    return attributes[STATE]


def with_eager(eager_forward: Callable) -> Callable[[Callable], Callable]:
    """Decorator of a replaced forward: `eager_forward` runs where the original forward would be wrong."""

    def mark(forward: Callable) -> Callable:
        _EAGER[forward] = eager_forward
        return forward

    return mark


def eager_of(forward: Callable) -> Callable | None:
    """The function that `with_eager` gave a forward; None for any other forward."""
    return _EAGER.get(forward)
