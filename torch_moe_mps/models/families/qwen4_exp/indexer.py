"""An indexer that selects pools of keys by their means."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....ops._checks import dtype_name
from ...attention.causal_mask import CausalMask
from ...attention.chosen_keys import Choice
from ...attention.pools import BATCH, BEFORE, POOLS, RATE, TOKENS, fits, is_same, layer_of, pools_of
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import original_class, state_of
from ...caches.held import HeldPools
from ...modules.rules.rope import WHOLE_TURNS, Turn, tables_and_options
from ...trials.draws import eager
from ...trials.forms import has_parts
from ...trials.indexers import IndexerTrial, form_by_trial
from ...trials.replicas import HeldKeys, numbers, replica_of

ops = torch.ops.moe_mps

_PARTS = ("index_qk_proj", "q_layernorm", "k_layernorm")
_NUMBERS = (
    "index_n_heads",
    "index_kv_heads",
    "index_head_dim",
    "compress_ratio",
    "block_topk",
    "layer_idx",
)


def masks_choices(module: Any) -> bool:
    return module.indexer is not None and has_parts(module.indexer, _PARTS, _NUMBERS)


def qsa_forward(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor,
    cache: Any,
) -> Tensor:
    """The forward of a rewritten indexer: a mask of the selected keys, made when attention asks."""
    layer = layer_of(indexer, cache)
    runs = (
        type(attention_mask) is CausalMask
        and attention_mask.key_range is None
        and attention_mask.window is None
        and attention_mask.lookahead == 0
        and attention_mask.seen == attention_mask.shape[3]
        and hidden_states.dtype is not torch.float64
        and (layer is None or isinstance(layer, HeldPools))
        and not is_observed(*_norms(indexer))
    )
    if not runs:
        return NotImplemented
    turn: Turn = state_of(indexer).formula
    choice = _choice(indexer, turn, hidden_states, position_embeddings, layer)
    if choice is None:
        return attention_mask
    return choice.as_mask(attention_mask, 1, *attention_mask.shape[2:])


def _choice(indexer: Any, turn: Turn, hidden_states: Tensor, tables: Any, layer: Any) -> Choice | None:
    """Adds the new keys to the cache. Returns: None where tokens may choose all pools."""
    width, rate, heads = indexer.index_head_dim, indexer.compress_ratio, indexer.index_n_heads
    q, keys = indexer.index_qk_proj(hidden_states).split_with_sizes([heads * width, width], -1)
    cached_tokens = 0 if layer is None else layer.indexed()
    if (cached_tokens + keys.shape[1]) // rate <= indexer.block_topk:
        if layer is not None:
            layer.update_indexer(keys)
        return None
    q, keys = _turned_beside(indexer, turn, q.unflatten(-1, (heads, width)), keys, tables, layer)
    pools = pools_of(layer, keys, rate, partial(_means, indexer, turn, keys, tables))
    return Choice(q, pools, None, indexer.block_topk, width**-0.5, rate, {"tail": 1}, is_pooled=True)


def _turned_beside(
    indexer: Any, turn: Turn, q: Tensor, keys: Tensor, tables: Any, layer: Any
) -> tuple[Tensor, Tensor]:
    """The queries [B, T, H, D], normed and rotated; the new keys [B, T, D] behind the cached ones."""
    norm, tokens = _norms(indexer)[0], keys.shape[1]
    cos, sin, options = tables_and_options(turn, *(table[:, -tokens:] for table in tables))
    reserved = None if layer is None else layer.reserve_index(keys)
    if reserved is None:
        rotated = ops.rope_heads(
            q, cos, sin, norm.weight, norm_eps=norm.eps, norm_weight_offset=1.0, **options
        )
        keys = keys if layer is None else layer.update_indexer(keys)
    else:  # one dispatch: the queries are rotated as keys, and the new keys, which do not turn, are values
        rotated = q.new_empty(q.shape[0], q.shape[2], tokens, q.shape[3])
        written = rotated, reserved.unsqueeze(1)
        ops._rope_cache_(
            *(None, q, keys.unsqueeze(2), *written, cos, sin, None, norm.weight, norm.eps, 1.0), **options
        )
        keys = layer.take_index(reserved)
    return rotated.transpose(1, 2), keys


def _means(indexer: Any, turn: Turn, keys: Tensor, tables: Any, first: int, last: int) -> Tensor:
    """The means of the keys of pools, normed and rotated as their first keys are."""
    norm, rate = _norms(indexer)[1], indexer.compress_ratio
    rows = keys[:, first * rate : last * rate].unflatten(1, (-1, rate))
    pooled = ops._pointwise(rows, "to a f32", dtype_name(keys.dtype), mean=True).unsqueeze(2)
    of_pools = (table[:, first * rate : last * rate : rate] for table in tables)
    cos, sin, options = tables_and_options(turn, *of_pools)
    return ops.rope_heads(
        pooled, cos, sin, norm.weight, norm_eps=norm.eps, norm_weight_offset=1.0, **options
    ).squeeze(1)


def _norms(indexer: Any) -> tuple[Any, Any]:
    return indexer.q_layernorm, indexer.k_layernorm


# Recognising an indexer


def rewrite_qsa_indexer(module: Any) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an indexer of pools by their means, else None."""
    if not has_parts(module, _PARTS, _NUMBERS) or module.index_kv_heads != 1:
        return None
    if not fits(module.index_n_heads, module.index_head_dim, module.compress_ratio):
        return None
    has_norms = all(hasattr(norm, "eps") for norm in _norms(module))
    turn = form_by_trial(module, WHOLE_TURNS, _trial) if has_norms else None
    if turn is None:
        return None
    state_of(module).formula = turn
    return qsa_forward, [Done("_index_topk"), Done("_rope_cache_")]


def _trial(module: Any) -> IndexerTrial:
    """A trial of how queries and keys turn."""
    sizes = {"compress_ratio": RATE, "block_topk": POOLS, "token_budget": RATE * POOLS}
    replica, width, keys = replica_of(module, **sizes), module.index_head_dim, BEFORE + TOKENS
    hidden = numbers(BATCH, TOKENS, replica.index_qk_proj.in_features)
    before = numbers(BATCH, BEFORE, width)
    both = numbers(BATCH, keys, width // 2 + 1) + 1.0
    tables = [both[..., :-1], both[..., 1:]]
    shown = torch.ones(keys, keys, dtype=torch.bool).tril()[-TOKENS:].expand(BATCH, 1, -1, -1)
    return IndexerTrial(
        held=lambda: HeldKeys(before, replica.layer_idx),
        own=lambda cache: eager(original_class(module).forward)(replica, hidden, tables, shown, cache),
        ours=lambda turn, layer: _choice(replica, turn, hidden, tables, layer),
        is_same=is_same,
    )
