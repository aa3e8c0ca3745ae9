"""The engine's calls of a model's own `generate`: what they change of it is never put onto the model."""

import functools
from typing import Any

from ..transformers.caches.cache import counts_tokens
from ..transformers.caches.prompt_cache import runs_on
from ..transformers.upstream.calls import cache_among


def call_generate(model: Any, *args: Any, counting: Any = None, **given: Any) -> Any:
    """Result of a model's `generate`, in caches that are the engine's.

    The first step of assisted generation skips what its cache has, as that of plain generation does. And a
    cache that no token can be taken back from (`runs_on`) need not be given back as it was: otherwise
    transformers would wait for each token before it computes the next.

    Args:
        counting: a `Speculation`, which counts what is drafted and accepted.
    """
    cls: Any = type(model)
    stand_in: Any = object.__new__(_class_of(cls))
    stand_in.__dict__ = vars(model)  # one state: nothing is copied, and what a call writes is the model's
    object.__setattr__(stand_in, _MODEL, model)
    object.__setattr__(stand_in, _COUNTING, counting)
    pipeline = getattr(model, "pipeline", None)
    if pipeline is not None:
        return pipeline.generate(*args, by=stand_in, **given)
    return stand_in.generate(*args, **given)


# Slots of a stand-in: its dictionary is the model's.
_MODEL, _COUNTING = "_moe_mps_model", "_moe_mps_counting"
# Methods that `generate` calls, and that must see the model itself, which is known by identity.
_OF_THE_MODEL = ("__call__", "forward", "_update_model_kwargs_for_generation")


@functools.cache
def _class_of(original: type) -> type:
    """The class of the stand-ins of a class of models; its name is what transformers looks at."""

    def prepare(self: Any, ids: Any, next_sequence_length: int | None = None, **given: Any) -> Any:
        cache = cache_among(given)
        counts = next_sequence_length is None and cache is not None and counts_tokens(cache)
        if counts and (before := cache.get_seq_length()):
            next_sequence_length = ids.shape[1] - before
        is_given = given.get("is_first_iteration") and getattr(cache, "_is_user_defined", False)
        if is_given and runs_on(cache):
            cache._is_user_defined = False
        own = getattr(self, _MODEL).prepare_inputs_for_generation
        return own(ids, next_sequence_length=next_sequence_length, **given)

    def candidates(self: Any, *others: Any, **named: Any) -> Any:
        made, counting = (
            getattr(self, _MODEL)._get_candidate_generator(*others, **named),
            getattr(self, _COUNTING),
        )
        return made if counting is None else counting.counted(made)

    members: dict[str, Any] = {
        "prepare_inputs_for_generation": prepare,
        "_get_candidate_generator": candidates,
        **{name: _handed_on(name) for name in _OF_THE_MODEL},
    }
    for name, member in members.items():  # transformers reads their arguments
        if (own := getattr(original, name, None)) is not None:
            functools.update_wrapper(member, own)
    members |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {"__slots__": (_MODEL, _COUNTING), **members})


def _handed_on(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, _MODEL), name)(*args, **kwargs)

    return call
