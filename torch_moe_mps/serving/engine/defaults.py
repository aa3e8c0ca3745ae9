"""The settings of an answer: one rule for chat, generate, serve and whatever else answers.

Tokens are chosen as the checkpoint's generation_config says, and greedily where it says nothing. An answer
may be as long as the checkpoint says, by either of its two lengths, and otherwise as the context goes. It
ends by a token of the generation_config, or by the tokenizer's: fine-tuned chats often change that one alone.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from .ranges import vocabulary_of

# Settings of a draw, and the values with which they change nothing.
_OF_DRAWS: dict[str, tuple[float, ...]] = {
    "temperature": (),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
}
_USUAL = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}


def choice(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that somebody asks for, with do_sample where they decide it.

    Temperature 0 is greedy. Any other setting of a draw asks for one, unless its value changes nothing.
    """
    settings = dict(asked)
    if settings.get("top_k") == -1:  # vLLM's name of all
        settings["top_k"] = 0
    if settings.get("temperature") == 0:
        settings = {name: value for name, value in settings.items() if name not in _OF_DRAWS}
        settings["do_sample"] = False
    elif "do_sample" not in settings and any(
        settings.get(name) is not None and settings[name] not in neutral
        for name, neutral in _OF_DRAWS.items()
    ):
        settings["do_sample"] = True
    return settings


def settings_of_draw(model: Any) -> dict[str, Any]:
    """Settings with which the model draws tokens: the checkpoint's, or usual ones where it says greedy."""
    return {"do_sample": True, **({} if model.generation_config.do_sample else _USUAL)}


def settings_of_answer(
    model: Any,
    tokenizer: Any,
    asked: Mapping[str, Any],
    prompt: int,
    context: int,
    most: int | None = None,
    whole: Any = None,
) -> GenerationConfig:
    """The settings of one answer of a model.

    Args:
        tokenizer: whose end of a text ends the answer, unless `asked` or `whole` says which tokens do.
        asked: what `choice` gives; in place of the checkpoint's.
        prompt: tokens in front of the answer.
        context: the most tokens that the model reads.
        most: the tokens of the answer, at most; None leaves that to the settings, and to the context.
        whole: all settings {name: value}, in place of the checkpoint's but for the tokens that end an answer.

    A `max_length`, which counts the prompt, holds where no number of new tokens is said. A checkpoint's that
    is no longer than the prompt says nothing of the answer.

    Raises: TypeError, ValueError, AttributeError for settings that do not exist, and for a `max_length` in
        `whole` that leaves no token.
    """
    own = model.generation_config
    config = copy.deepcopy(own) if whole is None else GenerationConfig(**whole)
    if not asked.get("do_sample", config.do_sample):  # transformers warns of what changes nothing then
        asked = {name: value for name, value in asked.items() if name not in _OF_DRAWS}
    config.update(**asked)
    if config.eos_token_id is None:
        config.eos_token_id = own.eos_token_id
    if "eos_token_id" not in {*asked, *(whole or ())}:
        config.eos_token_id = _with_end(config.eos_token_id, tokenizer, vocabulary_of(model))
    longest, room = config.max_new_tokens if most is None else most, context - prompt
    if longest is None and config.max_length is not None:
        longest = config.max_length - prompt
        if longest < 1 and whole is not None:
            raise ValueError(f"max_length {config.max_length}, which counts the prompt's {prompt} tokens")
        longest = longest if longest > 0 else room
    config.max_new_tokens = room if longest is None else max(1, min(longest, room))
    config.max_length = None
    return config


def _with_end(ends: Any, tokenizer: Any, vocabulary: int) -> Any:
    """Tokens that end an answer, with the tokenizer's if the model knows it."""
    last, known = tokenizer.eos_token_id, ends if isinstance(ends, list) else [ends]
    if type(last) is not int or last >= vocabulary or last in known:
        return ends
    return [*(token for token in known if token is not None and token < vocabulary), last]
