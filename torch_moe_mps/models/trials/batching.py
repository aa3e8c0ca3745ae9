"""Trials of a small model as rows of a batch: whether it takes their positions, and any order of their keys.

Keys that hold their positions may lie in any order, but for layers with a window. Biases by distance, and
windows that the model's eager code cuts out of all keys, go by the places where the keys lie.
"""

import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._text import first_line
from ..basics.state import class_before
from ..caches.batched import BatchedCache
from ..caches.cache import grow_cache
from ..caches.prompt_cache import new_cache
from ..caches.separate import by_sequence, reads_a_layer
from ..upstream.calls import cache_argument
from .comparing import TOLERANCE
from .memory import note_error, recall_of_model
from .small_models import VOCABULARY, WINDOW, small_model

_LENGTHS = (3 * WINDOW, 3 * WINDOW - 5)  # tokens of the conversations
_DRAFTS = 4  # tokens of each, of which one row keeps all


def reason_for_order(model: PreTrainedModel) -> str | None:
    """Why keys in the caches of a model must lie in their order, for a person; None where any will do."""
    return recall_of_model(model, lambda: _tried(model), _tried)


def reason_against_rows(model: PreTrainedModel) -> str | None:
    """Why conversations of a model cannot be rows of one call, for a person; None where they can.

    Rotations take the positions of each row. Models without them are tried: some number tokens from where
    the cache ends, or from another place than 0.
    """
    if any(hasattr(module, "inv_freq") for module in model.modules()):
        return None
    return recall_of_model(model, lambda: _tried_rows(model), _tried_rows)


def _tried(model: PreTrainedModel) -> str | None:
    name = class_before(model).__name__
    try:
        return None if _is_alike(model, _DRAFTS) else f"attention of {name} goes by the places of keys"
    except Exception as error:  # the model's own, for what it does not take
        note_error(error)
        return f"a small {name} cannot be tried ({first_line(error)})"


def _tried_rows(model: PreTrainedModel) -> str | None:
    try:
        is_alike = _is_alike(model, 0)
    except Exception as error:  # the model's own: rows of it say so themselves
        note_error(error)
        return None
    return None if is_alike else f"{class_before(model).__name__} does not take the positions of rows"


def _is_alike(model: PreTrainedModel, drafts: int) -> bool:
    """True if rows of different lengths go on as they do alone, on a small model.

    Args:
        drafts: tokens of each before, by which the rows move on, each by its own number.
    """
    torch.default_generator.manual_seed(0)
    return _goes_on(small_model(model, lambda small: _logits_of(small, torch.arange(2, 8)[None])), drafts)


def _goes_on(model: PreTrainedModel, drafts: int) -> bool:
    """True if sequences of several lengths in one step give the logits that each gives alone."""
    generator, rows, talks = torch.Generator().manual_seed(0), BatchedCache(model), list[Tensor]()
    for module in filter(reads_a_layer, model.modules()):
        module.forward = types.MethodType(by_sequence(type(module).forward), module)
    for length in _LENGTHS:
        ids = torch.randint(2, VOCABULARY // 2, (1, length + drafts + 1), generator=generator)
        cache = new_cache(model)
        _called(model, cache, input_ids=ids[:, :length], use_cache=True)
        rows.admit(cache, length)
        talks.append(ids)
    if rows.are_states and not drafts:
        return True  # states have the order of tokens, without positions
    kept, alike = [drafts, 0 if rows.are_states else min(1, drafts)], True
    if drafts:
        if rows.are_states:
            rows.hold()
        rows.reserve(drafts)
        tokens = torch.cat([ids[:, n : n + drafts] for ids, n in zip(talks, _LENGTHS, strict=True)])
        for token in tokens.split(1, 1):  # eager code may forget its states in front of several
            _called(model, rows.cache, input_ids=token, **rows.arguments())
            rows.advance()
        rows.take_back([drafts - count for count in kept])
    ends = [n + count for n, count in zip(_LENGTHS, kept, strict=True)]
    token = torch.cat([ids[:, n : n + 1] for ids, n in zip(talks, ends, strict=True)])
    found = _called(model, rows.cache, input_ids=token, **rows.arguments())
    for row, (ids, end) in enumerate(zip(talks, ends, strict=True)):
        expected = _logits_of(model, ids[:, : end + 1])[0, -1]
        error = (found[row, -1] - expected).abs().max() / expected.abs().max()
        alike = alike and bool(error <= TOLERANCE)
    return alike


def _called(model: PreTrainedModel, cache: Any, **inputs: Any) -> Tensor:
    argument = cache_argument(model, cache)
    grow_cache(model, (), argument)
    logits: Tensor = model(**inputs, **argument).logits
    return logits


def _logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
