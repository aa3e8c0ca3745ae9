"""--set FLAG=VALUE: arguments of generate()."""

from collections.abc import Sequence
from typing import Any

_OF_TEXT = {
    "cache_implementation", "dola_layers", "early_stopping", "num_assistant_tokens_schedule",
    "speculation_type", "stop_strings",
}  # fmt: skip


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """The arguments, with values as transformers' chat reads them.

    Raises: ValueError for what is no argument of generate(), which transformers' chat would ignore, and for
        text where generate() takes numbers.
    """
    from transformers import GenerationConfig
    from transformers.cli.chat import parse_generate_flags

    settings: dict[str, Any] = parse_generate_flags([*texts])
    config = GenerationConfig()
    for name, value in settings.items():
        if isinstance(value, str) and name in vars(config).keys() - _OF_TEXT:
            raise ValueError(f"--set {name} must be a number, true, false, None or a list, got {value}")
    unknown = config.update(**settings)
    if unknown:
        raise ValueError(f"--set must name arguments of generate(), got {', '.join(unknown)}")
    return settings
