"""The guesses that somebody asks for: by a name, or with a source of their own."""

from typing import Any

from transformers import PreTrainedModel

from ..prompts import Prompts
from . import LOOKUP, MTP
from .dflash import DFlash, is_dflash
from .draft import Draft
from .guessing import Guessing
from .lookup import Lookup
from .mtp import Mtp
from .source import Source
from .width import MOST, Width


def guessing_of(
    model: PreTrainedModel, guesses: Any, prompts: Prompts | None, name: str, width: int | None = None
) -> Guessing | None:
    """The guesses that somebody asks for.

    Args:
        guesses: None for none, "lookup", "mtp", a draft model or assistant, a `Source`, or a list of these.
        prompts: of the model, that are kept.
        name: of who asks, for errors.
        width: how many tokens are guessed; None leaves it to the times of steps.

    Raises: ValueError.
    """
    if width is not None and not (type(width) is int and 1 <= width <= MOST):
        raise ValueError(f"{name}: width must be from 1 to {MOST}, got {width}")
    if guesses is None:
        return None
    wanted = guesses if isinstance(guesses, list) else [guesses]
    return Guessing(model, [_source_of(model, each, prompts, name) for each in wanted], Width(width))


def _source_of(model: PreTrainedModel, guesses: Any, prompts: Prompts | None, name: str) -> Source:
    memory = 0 if prompts is None else prompts.memory
    if isinstance(guesses, str) and guesses == LOOKUP:
        return Lookup(prompts)
    if isinstance(guesses, str) and guesses == MTP:
        return Mtp(model, memory)
    if isinstance(guesses, PreTrainedModel) and is_dflash(guesses.config):
        return DFlash(model, guesses)
    if isinstance(guesses, PreTrainedModel):
        return Draft(model, guesses, memory)
    if hasattr(guesses, "guess") and hasattr(guesses, "accepted"):
        source: Source = guesses
        return source
    got = repr(guesses) if isinstance(guesses, str) else f"a {type(guesses).__name__}"
    expected = (
        f"None, {LOOKUP!r}, {MTP!r}, a draft model or assistant, an object with guess() and accepted(), "
        "or a list of these"
    )
    raise ValueError(f"{name}: guesses must be {expected}, got {got}")
