"""Whether attention finds the same whichever way the keys lie in a cache, tried on a small model.

Keys that hold their positions may lie in any order, but for layers with a window. Biases by distance, and
windows that the model's own code cuts out of all keys, go by the places where the keys lie.
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._text import first_line
from .basics.classes import class_before
from .caches.cache import grow_cache
from .caches.prompt_cache import new_cache
from .caches.rows import Rows
from .shrunk import VOCABULARY, WINDOW, small_model
from .twin import TOLERANCE, apart
from .upstream.calls import cache_argument

_LENGTHS = (3 * WINDOW, 3 * WINDOW - 5)  # tokens of the conversations
_GUESSES = 4  # tokens of a step of each, of which one row keeps all
_reasons: dict[tuple[type, str], str | None] = {}  # {class and config of a model: what was found}


def reason_for_order(model: PreTrainedModel) -> str | None:
    """Why keys in the caches of a model must lie in their order, for a person; None where any will do."""
    cls: Any = class_before(model)
    key = cls, json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    if key not in _reasons:
        _reasons[key] = _tried(model)
    return _reasons[key]


def _tried(model: PreTrainedModel) -> str | None:
    name = class_before(model).__name__
    with apart():
        torch.default_generator.manual_seed(0)
        try:
            twin = small_model(model, lambda small: _logits_of(small, torch.arange(2, 8)[None]))
            return None if _is_alike(twin) else f"attention of {name} goes by the places of keys"
        except Exception as error:  # the model's own, for what it does not take
            return f"a small {name} cannot be tried ({first_line(error)})"


def _is_alike(model: PreTrainedModel) -> bool:
    """Whether rows that have moved on by different numbers of tokens go on as they do alone."""
    generator, rows, talks = torch.Generator().manual_seed(0), Rows(model), list[Tensor]()
    for length in _LENGTHS:
        ids = torch.randint(2, VOCABULARY // 2, (1, length + _GUESSES + 1), generator=generator)
        cache = new_cache(model)
        _called(model, cache, input_ids=ids[:, :length], use_cache=True)
        rows.join(cache)
        talks.append(ids)
    if rows.are_states:
        rows.hold()
    kept, alike = [_GUESSES, 0 if rows.are_states else 1], True
    tokens = torch.cat([ids[:, n : n + _GUESSES] for ids, n in zip(talks, _LENGTHS, strict=True)])
    _called(model, rows.cache, input_ids=tokens, **rows.arguments(_GUESSES))
    rows.advance(_GUESSES)
    rows.take_back([_GUESSES - count for count in kept])
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
