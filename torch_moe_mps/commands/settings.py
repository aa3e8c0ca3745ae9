"""--set FLAG=VALUE: arguments of generate()."""

from collections.abc import Sequence
from typing import Any


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """The arguments, with values as transformers' chat reads them.

    Raises: ValueError for what is no argument of generate(), which transformers' chat would ignore.
    """
    from transformers import GenerationConfig
    from transformers.cli.chat import parse_generate_flags

    settings: dict[str, Any] = parse_generate_flags([*texts])
    unknown = GenerationConfig().update(**settings)
    if unknown:
        raise ValueError(f"--set must name arguments of generate(), got {', '.join(unknown)}")
    return settings
