"""--set FLAG=VALUE and options of their own: arguments of generate()."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

_OF_TEXT = {
    "cache_implementation", "dola_layers", "early_stopping", "num_assistant_tokens_schedule",
    "speculation_type", "stop_strings",
}  # fmt: skip
# Without sampling, transformers ignores these, whatever they are.
_WORDS = {"true": True, "false": False, "none": None}
_OPTIONS = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_p": "top_p"}
_AT_MOST = {"temperature": math.inf, "top_k": math.inf, "top_p": 1, "min_p": 1, "typical_p": 1}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of --set, --max-tokens, --temperature and --top-p. Raises: ValueError."""
    settings = read_settings(options.set)
    for option, name in _OPTIONS.items():
        if (value := getattr(options, option)) is None:
            continue
        if name in settings:
            written = option.replace("_", "-")
            raise ValueError(f"--{written} and --set {name} are one setting; leave one out")
        settings[name] = value
    return settings


def read_settings(texts: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """The arguments of texts such as FLAG=VALUE, which errors call `option`.

    A value is true, false, None, a number, a list of numbers, or else a text.

    Raises: ValueError for unknown arguments of generate(), for text where generate() takes numbers, and for
        numbers out of range.
    """
    from transformers import GenerationConfig

    settings = {name: _value(value) for name, _, value in (text.partition("=") for text in texts)}
    config = GenerationConfig()
    for name, value in settings.items():
        if isinstance(value, str) and name in vars(config).keys() - _OF_TEXT:
            raise ValueError(f"{option} {name} must be a number, true, false, None or a list, got {value}")
        highest = _AT_MOST.get(name)
        if highest is not None and isinstance(value, int | float) and not 0 <= value <= highest:
            raise ValueError(f"{option} {name} must be from 0 to {highest}, got {value}")
    if "max_length" in settings:  # it counts the prompt
        raise ValueError(f"{option} max_length must be left out: max_new_tokens says how long an answer is")
    unknown = config.update(**{"do_sample": True, **settings})  # temperature implies it
    if unknown:
        raise ValueError(f"{option} must name arguments of generate(), got {', '.join(unknown)}")
    return settings


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | list) else text
