"""An indexer that chooses blocks of keys, for each head of keys by itself.

While a token may choose all blocks, the indexer only adds its own keys to the cache. Beyond that the operator
`_index_topk` chooses, when attention asks. What the indexer computes in front of that is recognised by
running it with other numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.families.index import MAX_INDEX_WIDTH
from ...attention.chosen_keys import Choice
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import original_class, state_of
from ...caches.held import HeldIndex
from ...modules.experts import NAME
from ...modules.rules.norms import is_norm, norm_arguments
from ...modules.rules.rope import WHOLE_TURNS, Turn, tables_and_options
from ...trials.draws import eager, is_first_kind
from ...trials.forms import has_parts
from ...trials.indexers import IndexerTrial, form_by_trial
from ...trials.replicas import HeldKeys, numbers, replica_of

ops = torch.ops.moe_mps

_LAYERS = ("q_proj", "k_proj", "q_norm", "k_norm")
_NUMBERS = ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")
_BATCH, _TOKENS, _BEFORE = 2, 3, 6  # sizes of a trial


class _HeldBlocks(HeldKeys):
    """The cache of a trial, by the name that these models have for an update."""

    update_index = HeldKeys.update_indexer


def block_indexer_forward(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor
) -> Any:
    """The forward of a rewritten indexer: a Choice; None where tokens may choose all blocks.

    Blocks begin with the cache's first token, whatever the positions are.
    """
    q_norm, k_norm = (norm_arguments(norm, indexer.q_norm.weight) for norm in _norms(indexer))
    layer = None if cache is None else cache.layers[indexer.layer_idx]
    runs = (
        indexer.config._attn_implementation == NAME
        and hidden_states.dtype is not torch.float64
        and q_norm is not None
        and k_norm is not None
        and q_norm[1:] == k_norm[1:]
        and not is_observed(*_norms(indexer))
        and (layer is None or isinstance(layer, HeldIndex))
    )
    if not runs:
        return NotImplemented
    return _chosen(
        indexer, state_of(indexer).formula, hidden_states, position_embeddings, layer, q_norm, k_norm
    )


def _norms(indexer: Any) -> tuple[nn.Module, nn.Module]:
    return indexer.q_norm, indexer.k_norm


def _chosen(
    indexer: Any, turn: Turn, hidden: Tensor, tables: Any, layer: Any, q_norm: Any, k_norm: Any
) -> Choice | None:
    """The choice among blocks of keys; None if there are too few to choose from."""
    width = indexer.head_dim
    seen = hidden.shape[1] + (0 if layer is None else layer.indexed())
    k, q, q_norm_weight = indexer.k_proj(hidden), None, None
    chooses = seen > indexer.topk_blocks * indexer.block_size
    if chooses:
        q, q_norm_weight = indexer.q_proj(hidden).unflatten(-1, (indexer.num_heads, width)), q_norm[0]
    cos, sin, options = tables_and_options(turn, *(table[..., :width] for table in tables))
    weight, eps, offset = k_norm
    reserved = None if layer is None else layer.reserve_index(k)
    index_keys = k.new_empty(k.shape) if reserved is None else reserved
    keys = k.unsqueeze(2), None, index_keys.unsqueeze(1), None
    rotated = ops._rope_cache_(q, *keys, cos, sin, q_norm_weight, weight, eps, offset, **options)
    if layer is not None:
        index_keys = (
            layer.take_index(index_keys)
            if reserved is not None
            else layer.update_index(index_keys.unsqueeze(1))[:, 0]
        )
    if not chooses:
        return None
    arguments = {"reduce": "keys", "tail": min(indexer.local_blocks, indexer.topk_blocks)}
    return Choice(
        rotated.transpose(1, 2), index_keys, None, indexer.topk_blocks, 1.0, indexer.block_size, arguments
    )


# Recognising an indexer


def rewrite_block_indexer(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an indexer of blocks, else None."""
    if not has_parts(module, _LAYERS, _NUMBERS):
        return None
    width: Any = module.head_dim
    fits = width % 4 == 0 and 0 < width <= MAX_INDEX_WIDTH and hasattr(module, "config")
    if not fits or not all(is_norm(norm, True) for norm in _norms(module)):
        return None
    turn = form_by_trial(module, WHOLE_TURNS, _trial)
    if turn is None:
        return None
    state_of(module).formula = turn
    return block_indexer_forward, [Done("_index_topk"), Done("_rope_cache_")]


def _trial(module: Any) -> IndexerTrial:
    """A trial of how queries and keys turn."""
    replica, width = replica_of(module, block_size=2, topk_blocks=2), module.head_dim
    for norm, own_norm in zip(_norms(replica), _norms(module), strict=True):
        state_of(norm).formula = state_of(own_norm).formula
    # A prompt of all tokens is tried, too, whose first blocks are at an end.
    cached_tokens = _BEFORE if is_first_kind() else 0
    tokens = _BEFORE + _TOKENS - cached_tokens
    hidden = numbers(_BATCH, tokens, replica.k_proj.in_features)
    before = numbers(_BATCH, 1, cached_tokens, width)
    tables = [*(numbers(2, _BATCH, tokens, width // 2) + 1.0)]
    positions = torch.arange(cached_tokens, cached_tokens + tokens).expand(_BATCH, -1)
    norms = [norm_arguments(norm, before) for norm in _norms(replica)]
    return IndexerTrial(
        held=lambda: _HeldBlocks(before, replica.layer_idx),
        own=lambda cache: eager(original_class(module).forward)(replica, hidden, tables, cache, positions),
        ours=lambda turn, layer: _chosen(replica, turn, hidden, tables, layer, *norms),
        is_same=_is_same,
    )


def _is_same(expected: Tensor, choice: Choice) -> bool:
    """True if both choose the same blocks. The model's own are by score, and -1 is last in both."""
    chosen = choice.chosen(0, expected.shape[2], _BEFORE + _TOKENS)
    theirs = torch.where(expected < 0, _BEFORE, expected).sort(-1).values
    return torch.equal(theirs, torch.where(chosen < 0, _BEFORE, chosen).long())
