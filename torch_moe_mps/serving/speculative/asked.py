"""Drafters from the `speculative` option: a name, a model, or a Drafter."""

from typing import Any

from transformers import PreTrainedModel

from ..engine.drafter import Drafter
from ..engine.drafting import Drafting
from ..engine.width import MOST, Width
from ..prefix_cache.memory import PrefixCache
from . import LOOKUP, MTP
from .dflash import DFlash, is_dflash
from .draft import Draft
from .mtp import Mtp
from .prompt_lookup import Lookup


def drafting_of(
    model: PreTrainedModel, speculative: Any, prompts: PrefixCache | None, name: str, width: int | None = None
) -> Drafting | None:
    """Speculative decoding configured by the `speculative` option; None without it.

    Args:
        speculative: None, "lookup", "mtp", a draft model or assistant, a `Drafter`, or a list of these.
        prompts: the prefix cache of the model.
        name: of the caller, for errors.
        width: draft tokens per step; None adapts them to the acceptance rate.

    Raises: ValueError.
    """
    if width is not None and not (type(width) is int and 1 <= width <= MOST):
        raise ValueError(f"{name}: draft_width must be from 1 to {MOST}, got {width}")
    if speculative is None:
        return None
    wanted = speculative if isinstance(speculative, list) else [speculative]
    return Drafting(model, [_drafter_of(model, each, prompts, name) for each in wanted], Width(width))


def _drafter_of(model: PreTrainedModel, speculative: Any, prompts: PrefixCache | None, name: str) -> Drafter:
    """The drafter for one value of `speculative`. Raises: ValueError for any other value."""
    memory = 0 if prompts is None else prompts.memory
    if isinstance(speculative, str) and speculative == LOOKUP:
        return Lookup(prompts)
    if isinstance(speculative, str) and speculative == MTP:
        return Mtp(model, memory)
    if isinstance(speculative, PreTrainedModel) and is_dflash(speculative.config):
        return DFlash(model, speculative)
    if isinstance(speculative, PreTrainedModel):
        return Draft(model, speculative, memory)
    if isinstance(speculative, Drafter):
        return speculative
    got = repr(speculative) if isinstance(speculative, str) else f"a {type(speculative).__name__}"
    expected = f"None, {LOOKUP!r}, {MTP!r}, a draft model or assistant, a Drafter, or a list of these"
    raise ValueError(f"{name}: speculative must be {expected}, got {got}")
