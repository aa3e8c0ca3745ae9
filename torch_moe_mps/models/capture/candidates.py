"""Tokens that `generate(use_mtp=True)` of a model drafts by layers of its checkpoint."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

# Makes a generator of candidates from a model, a generation config and processors of logits.
CANDIDATES: list[Callable[[Any, Any, Any], Any]] = []
# {model: what was read of its MTP layers}; they are as the model was accelerated.
DRAFTING: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def are_by_layers(config: Any) -> bool:
    """True if transformers takes candidates from such layers, by the order of its questions to a config."""
    before = (config.assistant_early_exit, config.prompt_lookup_num_tokens)
    return before == (None, None) and bool(getattr(config, "use_mtp", None))  # transformers 5.23 has none
