"""Generation settings shared by chat, generate and serve.

Sampling follows the checkpoint's generation_config; without one it is greedy. The maximum length is the
checkpoint's `max_new_tokens` or `max_length`, otherwise the context. End tokens are those of the
generation_config and the tokenizer's: fine-tuned chat models often change only the latter.
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
    """Requested settings, with `do_sample` added where they imply it.

    Temperature 0 means greedy. Any other sampling setting means sampling, unless its value is neutral.
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
    """Sampling settings of a model: its checkpoint's, or common defaults if the checkpoint is greedy."""
    return {"do_sample": True, **({} if model.generation_config.do_sample else _USUAL)}


def settings_of_answer(
    model: Any,
    tokenizer: Any,
    asked: Mapping[str, Any],
    prompt: int,
    context: int,
    max_tokens: int | None = None,
) -> GenerationConfig:
    """GenerationConfig of one answer.

    Args:
        tokenizer: its end token is added, unless `asked` sets the end tokens.
        asked: result of `choice`; overrides the checkpoint's settings.
        prompt: number of prompt tokens.
        context: the context length of the model.
        max_tokens: the maximum length of the answer; None leaves it to the settings and the context.

    `max_length`, which includes the prompt, applies if no number of new tokens is set. A checkpoint's value
    that is not longer than the prompt is ignored.
    """
    config: GenerationConfig = copy.deepcopy(model.generation_config)
    if not asked.get("do_sample", config.do_sample):  # transformers warns of what changes nothing then
        asked = {name: value for name, value in asked.items() if name not in _OF_DRAWS}
    config.update(**asked)
    if "eos_token_id" not in asked:
        config.eos_token_id = _with_end(config.eos_token_id, tokenizer, vocabulary_of(model))
    longest, room = config.max_new_tokens if max_tokens is None else max_tokens, context - prompt
    if longest is None and config.max_length is not None:
        longest = config.max_length - prompt
        longest = longest if longest > 0 else room
    config.max_new_tokens = room if longest is None else max(1, min(longest, room))
    config.max_length = None
    return config


def _with_end(ends: Any, tokenizer: Any, vocabulary: int) -> Any:
    """End tokens, with the tokenizer's added if it is in the vocabulary."""
    last, known = tokenizer.eos_token_id, ends if isinstance(ends, list) else [ends]
    if type(last) is not int or last >= vocabulary or last in known:
        return ends
    return [*(token for token in known if token is not None and token < vocabulary), last]
