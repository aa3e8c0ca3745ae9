"""Indexers that select pools of neighbouring keys, by one key for each pool: the families' common part.

Each complete pool has its key once, next to the cache's; a token also reads its own pool while
that is incomplete. While a token may choose all pools, the indexer only adds its own keys to the cache.
Beyond that the operator `_index_topk` chooses, when attention asks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.families.attention import MAX_INDEX_BLOCK
from ...ops.families.index import MAX_INDEX_WIDTH
from ..trials.replicas import LEAST_HEADS, untied
from .chosen_keys import Choice

BATCH, TOKENS, BEFORE, RATE, POOLS = 8, 3, 8, 2, 2  # sizes of a trial


def layer_of(indexer: Any, cache: Any) -> Any:
    return None if cache is None else cache.layers[indexer.layer_idx]


def pools_of(layer: Any, keys: Tensor, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
    """[B, S // rate, D]: what `pool` makes of complete pools from a first one on in front of a last one."""
    count = keys.shape[1] // rate
    return pool(0, count) if layer is None else layer.pools_of(count, rate, pool)


def fits(heads: int, width: int, rate: int) -> bool:
    return (
        heads >= LEAST_HEADS
        and width % 4 == 0
        and 0 < width <= MAX_INDEX_WIDTH
        and 1 < rate <= MAX_INDEX_BLOCK
    )


def is_same(expected: Tensor, found: Choice) -> bool:
    """True if a mask shows the selected keys, of tokens whose pools have no equal scores."""
    known = untied(found.q, found.k)
    tokens, keys = expected.shape[-2:]
    order = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    mask = found.as_mask(None, 1, tokens, keys)
    return bool(known.any()) and torch.equal((expected & order)[:, 0][known], (mask & order)[:, 0][known])
