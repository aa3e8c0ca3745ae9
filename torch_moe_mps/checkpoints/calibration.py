"""Importance matrix computed from a text, by a model that is loaded for it and freed again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .._faults import free
from ..macs import machine_memory
from ..ops._checks import Check
from .quantize.importance import (
    Importance,
    collect_importance,
    given_importance,
    is_file_of_importance,
)
from .quantize.sizes import total_bytes
from .source import Source, read_tokenizer

AUTO = "auto"
SAMPLE = Path(__file__).parents[1] / "commands/sample.txt"
# Tokens that are read of a text; the rest is left out.
TOKENS = 1 << 16
_LETTERS, _EDGE = 8, 64  # letters read for a token at first; tokens that the end of what was read may change
# A dense model runs as it is if it takes no more of the machine's memory.
_SHARE = 0.4
_CHECK = Check("importance")


def importance_for(
    function: str,
    importance: Importance | str | os.PathLike,
    source: Source,
    load: Callable[[bool], Any],
) -> Importance:
    """Importance matrix for the `importance` argument: an Importance, a file, a text, or "auto".

    Args:
        function: name of the caller, for errors.
        source: folder or name of the model.
        load: loads the model on its device, dense for True, quantised as requested for False.

    Raises: what `read_importance` and `collect_importance` do, and ValueError for a text that is no UTF-8.
    """
    is_text = isinstance(importance, str | os.PathLike) and not is_file_of_importance(Path(importance))
    if not is_text:
        result = given_importance(function, importance, True)
        assert result is not None
        return result
    name = str(importance)
    text = text_for(name)
    ids = tokens_of_text(source, text, TOKENS)
    model = load(is_read_as_it_is(source))
    device = model.device
    result = collect_importance(model, ids, text=text)
    del model
    free(device)
    return result


def is_read_as_it_is(source: Source) -> bool:
    """True if a model runs as stored: quantised, or small enough."""
    if source.stored or source.gguf is not None:
        return True
    return total_bytes(source.skeleton()) < _SHARE * machine_memory()


def text_for(name: str) -> str:
    """The text in a file, or for "auto" the built-in one. Raises: ValueError."""
    file = SAMPLE if name == AUTO else Path(name)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        _CHECK.fail(file.name, "a file of importance, or a text in UTF-8", f"neither: {error}")
    except OSError as error:
        expected = f'a file of importance, a text, or "{AUTO}"'
        raise ValueError(f"moe_mps::importance: {file} must be {expected}, got {error.strerror}") from None


def tokens_of_text(source: Source, text: str, count: int) -> Tensor:
    """First tokens of a text, by the model's tokenizer."""
    tokenizer = read_tokenizer(source.path, source.gguf, bool(source.others.get("trust_remote_code")))
    letters = _LETTERS * (count + _EDGE)
    while True:
        ids = tokenizer(text[:letters], return_tensors="pt", verbose=False).input_ids[0]
        if len(ids) >= count + _EDGE or letters >= len(text):
            return ids[:count]
        letters *= _LETTERS
