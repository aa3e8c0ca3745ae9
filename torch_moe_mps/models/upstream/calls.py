"""Calls of transformers' forwards: arguments are found by what they are for, whatever a release calls them.

An argument for the cache is `past_key_values` or `cache_params` up to transformers 5.23, and `cache` from
5.24 on.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from torch.fx.experimental import _config
from transformers import Cache, EncoderDecoderCache
from transformers.utils import logging

CACHE = "cache"  # the name of that argument in forwards of this package
_CACHE_NAMES = (CACHE, "past_key_values", "cache_params")
# Options that models hand down to all of their modules. They change nothing of what a module computes whose
# code has no argument of this name.
NEUTRAL = frozenset(
    (
        # Positions: of a module that turns nothing by them. Sequences in one row come by other names, too.
        *("position_ids", "position_embeddings"),
        # Results that the model gives besides, and the cache, which is an argument of its own.
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("logits_to_keep", "is_first_iteration"),  # used up above all modules
    )
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)


def cache_name(forward: Callable) -> str | None:
    """Name of the argument of a forward, or of a bound one, that takes its cache; None without one."""
    forward = inspect.unwrap(forward)
    return _cache_name(getattr(forward, "__func__", forward))


@functools.lru_cache(maxsize=4096)
def _cache_name(forward: Callable) -> str | None:
    """The one whose type is a Cache, else the one with a name that it had in some release."""
    parameters = inspect.signature(forward).parameters
    typed = (name for name, parameter in parameters.items() if _is_cache_type(parameter.annotation))
    named = (name for name in _CACHE_NAMES if name in parameters)
    return next(typed, next(named, None))


def _is_cache_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return any(part.strip(" \"'").endswith("Cache") for part in annotation.split("|"))
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds)


def takes_positions(forward: Callable) -> bool:
    """True if a model's forward has an argument for the positions of its tokens."""
    return "position_ids" in inspect.signature(forward).parameters


def cache_argument(called: Any, cache: Any) -> dict[str, Any]:
    """The cache as an argument of a model's call and of its `generate`, or of a function's call."""
    name = cache_name(getattr(called, "forward", called))
    return {CACHE if name is None else name: cache}


def needed_arguments(forward: Callable, cache: Any) -> dict[str, Any]:
    """Arguments of a forward beside its input: the cache, and None for all others that it needs."""
    name = cache_name(forward)
    _, _, *others = inspect.signature(forward).parameters.values()
    required = (item.name for item in others if item.default is item.empty and item.kind in _NAMED)
    of_cache = {} if name is None else {name: cache}
    return dict.fromkeys(required) | of_cache


def cache_among(values: Mapping[str, Any], default: Any = None) -> Any:
    """The cache among the arguments of a call, or in what a call returns, else the default."""
    return next((value for value in values.values() if isinstance(value, Cache)), default)


def decoder_cache(cache: Any) -> Any:
    """The part of a cache that new tokens are added to."""
    return cache.self_attention_cache if type(cache) is EncoderDecoderCache else cache


class _Forms(NamedTuple):
    """Parameters of a forward of this package beside the parameters of the code that it replaces.

    Attributes:
        order: names of the code's positional arguments.
        known: {name of an argument of the code: its name in ours}; a name alone in `*args` and `**named`.
        defaults: {name of an argument of the code: its value where a call omits it}.
        needed: names of arguments that ours cannot do without.
        is_open: ours takes what comes in the order and by the names of the code.
        hands_cache_on: the code names no cache, and ours takes the one among its options.
    """

    order: tuple[str, ...]
    known: dict[str, str]
    defaults: dict[str, Any]
    needed: tuple[str, ...]
    is_open: bool = False
    hands_cache_on: bool = False


def _forms(original: Callable, ours: Callable) -> _Forms:
    """Rules by which an original function's arguments are passed to its replacement."""
    _, *theirs = inspect.signature(original).parameters.values()
    _, *parameters = inspect.signature(ours).parameters.values()
    names = [parameter.name for parameter in theirs if parameter.kind in _NAMED]
    defaults = {parameter.name: parameter.default for parameter in theirs}
    order = tuple(parameter.name for parameter in theirs if parameter.kind in _POSITIONAL)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return _Forms(order, {name: name for name in names}, defaults, (), is_open=True)
    wanted = [parameter.name for parameter in parameters]
    needed = tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)
    of_cache = cache_name(original) if CACHE in wanted else None
    known = _named_in_ours(names, wanted, order, of_cache)
    hands_cache_on = CACHE in wanted and of_cache is None
    return _Forms(order, known, defaults, needed, hands_cache_on=hands_cache_on)


def _named_in_ours(
    names: list[str], wanted: list[str], order: tuple[str, ...], of_cache: str | None
) -> dict[str, str]:
    """{name of an argument or an option of the code: its name in ours}, which differs for cache and input."""
    known = {name: name for name in (*names, *NEUTRAL) if name in wanted}
    if of_cache is not None:
        known[of_cache] = CACHE
    if wanted and order and wanted[0] not in known.values():
        known[order[0]] = wanted[0]
    return known


Given = tuple[tuple[Any, ...], dict[str, Any]]


def as_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
    """Arguments of a call as another forward takes them that has the same parameters."""
    return args, kwargs


class Binder:
    """Arguments of calls of a forward, as another one takes them that is in its place.

    That one names arguments as the forward does, but for the first one, and for the cache, which is `cache`.
    """

    def __init__(self, original: Callable, ours: Callable) -> None:
        self._forms = _forms(original, ours)
        order, known, _, needed, *_ = self._forms
        first = known.get(order[0]) if order else None
        self._first = first if {*needed} <= {first} else None  # the only argument that the other one needs

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        if self._first is not None and len(args) == 1 and not kwargs:
            return (args, kwargs) if self._forms.is_open else ((), {self._first: args[0]})
        return self._mapped(args, kwargs)

    def _mapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """Arguments of a call mapped to the other forward, or None if that is impossible.

        Arguments that the other forward lacks must be None, have their default, or be an option in NEUTRAL
        that this forward does not name.
        """
        order, known, defaults, needed, is_open, hands_cache_on = self._forms
        passed = dict(zip(order, args, strict=False))
        if len(args) > len(order) or any(name in passed for name in kwargs):
            return None
        values: dict[str, Any] = {}
        for name, value in (*passed.items(), *kwargs.items()):
            if name in known:
                values[known[name]] = value
            elif hands_cache_on and isinstance(value, Cache):
                values[CACHE] = value
            elif value is None or (
                _is_default(value, defaults[name]) if name in defaults else name in NEUTRAL
            ):
                continue
            else:
                return None
        if not all(name in values for name in needed):
            return None
        if is_open:
            return args, {name: value for name, value in values.items() if name in kwargs}
        return (), values


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def in_place(original: Callable, ours: Callable) -> Callable:
    """A forward that runs `ours` for calls that a Binder understands, and `original` for all others.

    `ours` returns NotImplemented for a call that wants more.
    """
    bound = Binder(original, ours)

    @functools.wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = bound(args, kwargs)
        result = NotImplemented if arguments is None else ours(module, *arguments[0], **arguments[1])
        return original(module, *args, **kwargs) if result is NotImplemented else result

    return forward


@torch.no_grad()
def call_on_shapes(model: Any, **inputs: Any) -> Any:
    """Output of a model of transformers on the meta device. Errors of the model's code are raised.

    Which experts or tokens are chosen changes no shape. The advice to install kernels for other machines,
    which transformers gives for hybrids, is not shown.
    """
    model.set_experts_implementation("batched_mm")  # transformers' own, which knows shapes without values
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]  # made at run time
            return model(use_cache=True, **inputs)
    finally:
        logging.set_verbosity(verbosity)
