"""Indexers that choose pools of neighbouring keys, by one key for each pool (GLM-5.3-Flash, Qwen4).

Each complete pool has its key once, beside those that the cache holds; a token also reads its own pool while
that is incomplete. While a token may choose all pools, the indexer only adds its own keys to the cache.
Beyond that the operator `index_topk` chooses, when attention asks. Padded rows run the model's own code.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops.attention import MAX_INDEX_BLOCK
from ....ops.index import MAX_INDEX_WIDTH
from ...attention.causal_mask import CausalMask
from ...attention.chosen_keys import EVERYTHING, Choice
from ...basics.report import Done
from ...basics.state import original_class, state_of
from ...caches.held import HeldPools
from ..experts import is_observed
from .constants import beside, constant
from .rope import WHOLE_TURNS, Turn, tables_and_options
from .trial import HeldKeys, agrees, has_parts, numbers, tried, twin_of, verdict

ops = torch.ops.moe_mps

_PADDED = "_moe_mps_padded"  # the attribute of a mask of padding that says whether it hides anything
_KPOOL = ("wq_b", "wk", "k_norm", "weights_proj")
_KPOOL_NUMBERS = ("n_heads", "head_dim", "index_topk", "index_kpool", "softmax_scale", "layer_idx")
_QSA = ("index_qk_proj", "q_layernorm", "k_layernorm")
_QSA_NUMBERS = (
    "index_n_heads",
    "index_kv_heads",
    "index_head_dim",
    "compress_ratio",
    "block_topk",
    "layer_idx",
)


def _layer_of(indexer: Any, cache: Any) -> Any:
    return None if cache is None else cache.layers[indexer.layer_idx]


def _pools(layer: Any, keys: Tensor, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
    """[B, S // rate, D]: what `pool` makes of complete pools from a first one on in front of a last one."""
    count = keys.shape[1] // rate
    return pool(0, count) if layer is None else layer.pools_of(count, rate, pool)


# GLM-5.3-Flash


def kpool_forward(
    indexer: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Any
) -> Any:
    """The forward of a rewritten indexer: a Choice, or EVERYTHING where tokens may choose all pools."""
    layer = _layer_of(indexer, past_key_values)
    runs = (
        indexer.config._attn_implementation == "sdpa"
        and hidden_states.dtype is not torch.float64
        and (layer is None or isinstance(layer, HeldPools))
        and not is_observed(indexer.k_norm)
    )
    if not runs or _is_padded(attention_mask, layer):
        if not runs and isinstance(layer, HeldPools):
            layer.is_padded = None  # nothing has looked at this call's mask
        own = original_class(indexer).forward
        return own(indexer, hidden_states, q_resid, attention_mask, past_key_values)
    return _choice_of_gated(indexer, hidden_states, q_resid, layer)


def _choice_of_gated(indexer: Any, hidden_states: Tensor, q_resid: Tensor, layer: Any) -> Any:
    width, rate = indexer.head_dim, indexer.index_kpool
    k = indexer.wk(hidden_states)
    gate = F.linear(hidden_states, indexer.index_kpool_compress_gate)
    one = constant(("one", k.device, k.dtype), lambda: k.new_ones(1, 1, 1))
    shown = one.expand(*k.shape[:2], 1)
    packed = (indexer.k_norm(k), gate, shown)
    slots = None if layer is None else layer.index_slots_of(packed)
    if slots is not None:
        keys = layer.take_index(slots)
    else:
        keys = torch.cat(packed, -1)
        keys = keys if layer is None else layer.update_indexer(keys)
    top_k = indexer.index_topk // rate
    if keys.shape[1] // rate <= top_k:
        return EVERYTHING
    pools = _pools(layer, keys, rate, functools.partial(_weighted, indexer, keys))
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, width))
    weights = indexer.weights_proj(hidden_states)
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    return Choice(q, pools, weights, top_k, scale, rate, {"tail": 1}, is_pooled=True)


def _is_padded(mask: Tensor, layer: HeldPools | None) -> bool:
    """Whether any row of a batch has or had padding. A single token is none."""
    noted = None if layer is None else layer.is_padded
    held = None if layer is None else layer.indexer_keys
    if noted is None and held is not None and held.shape[1] > 0:  # which the model's own code has written
        noted = not bool(held[..., -1].all())  # the column that says which keys are shown
    if not noted and mask.shape[1] > 1:
        noted = bool(beside(mask, _PADDED, lambda: not bool(mask.all())))
    if layer is not None:
        layer.is_padded = bool(noted)
    return bool(noted)


def _weighted(indexer: Any, packed: Tensor, first: int, last: int) -> Tensor:
    """The sums of the keys of pools, weighted by a softmax of their gates for each element."""
    width, rate = indexer.head_dim, indexer.index_kpool
    rows = packed[:, first * rate : last * rate].unflatten(1, (-1, rate))
    keys, gates, _ = rows.split_with_sizes([width, width, 1], -1)
    logits = gates.float() + indexer.index_kpool_compress_ape.float()
    return (logits.softmax(2).to(keys.dtype) * keys).sum(2)


# Qwen4


def qsa_forward(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor,
    past_key_values: Any,
) -> Tensor:
    """The forward of a rewritten indexer: a mask of what is chosen, which is made when attention asks."""
    layer = _layer_of(indexer, past_key_values)
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
        given = (hidden_states, position_embeddings, attention_mask, past_key_values)
        own: Tensor = original_class(indexer).forward(indexer, *given)
        return own
    turn: Turn = state_of(indexer).formula
    choice = _choice_of_means(indexer, turn, hidden_states, position_embeddings, layer)
    if choice is None:
        return attention_mask
    return choice.shown(attention_mask, 1, *attention_mask.shape[2:])


def _choice_of_means(
    indexer: Any, turn: Turn, hidden_states: Tensor, tables: Any, layer: Any
) -> Choice | None:
    width, rate, heads = indexer.index_head_dim, indexer.compress_ratio, indexer.index_n_heads
    q_norm, k_norm = _norms(indexer)
    q, keys = indexer.index_qk_proj(hidden_states).split_with_sizes([heads * width, width], -1)
    if layer is not None:
        keys = layer.update_indexer(keys)

    def mean(first: int, last: int) -> Tensor:
        rows = keys[:, first * rate : last * rate].unflatten(1, (-1, rate))
        pooled = rows.float().mean(2).to(keys.dtype).unsqueeze(2)
        of_pools = (table[:, first * rate : last * rate : rate] for table in tables)
        cos, sin, options = tables_and_options(turn, *of_pools)
        return ops.rope(pooled, None, cos, sin, k_norm.weight, None, k_norm.eps, 1.0, **options)[0].squeeze(1)

    if keys.shape[1] // rate <= indexer.block_topk:
        return None
    pools = _pools(layer, keys, rate, mean)
    of_tokens = (table[:, -hidden_states.shape[1] :] for table in tables)
    cos, sin, options = tables_and_options(turn, *of_tokens)
    q = q.unflatten(-1, (heads, width))
    (q, _) = ops.rope(q, None, cos, sin, q_norm.weight, None, q_norm.eps, 1.0, **options)
    q = q.transpose(1, 2)
    return Choice(q, pools, None, indexer.block_topk, width**-0.5, rate, {"tail": 1}, is_pooled=True)


def _norms(indexer: Any) -> tuple[Any, Any]:
    return indexer.q_layernorm, indexer.k_layernorm


# Recognising an indexer

_BATCH, _TOKENS, _BEFORE, _RATE, _POOLS = 2, 3, 8, 2, 2  # of a trial


def rewrite_pooled_indexer(module: Any) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for an indexer of pools, else None."""
    done = [Done("index_topk")]
    if has_parts(module, _KPOOL, _KPOOL_NUMBERS) and getattr(module, "index_kpool_always_select_tail", False):
        fits = isinstance(module.k_norm, nn.LayerNorm) and _fits(module.head_dim, module.index_kpool)
        return (kpool_forward, done) if fits and verdict(module, _agrees_gated) else None
    if has_parts(module, _QSA, _QSA_NUMBERS) and module.index_kv_heads == 1:
        fits = _fits(module.index_head_dim, module.compress_ratio)
        fits = fits and all(hasattr(norm, "eps") for norm in _norms(module))
        if fits and (turn := verdict(module, _turn_of_means)) is not None:
            state_of(module).formula = turn
            return qsa_forward, done
    return None


def _fits(width: int, rate: int) -> bool:
    return width % 4 == 0 and 0 < width <= MAX_INDEX_WIDTH and 1 < rate <= MAX_INDEX_BLOCK


def _agrees_gated(module: Any) -> bool:
    """Whether an indexer chooses what is chosen here."""
    twin, width = twin_of(module, index_topk=_RATE * _POOLS, index_kpool=_RATE), module.head_dim
    twin.index_kpool_compress_ape = nn.Parameter(numbers(_RATE, width), requires_grad=False)
    hidden, q_resid = (numbers(_BATCH, _TOKENS, layer.in_features) for layer in (twin.wk, twin.wq_b))
    before = torch.cat((numbers(_BATCH, _BEFORE, 2 * width), torch.ones(_BATCH, _BEFORE, 1)), -1)
    caches = [HeldKeys(before, twin.layer_idx) for _ in range(2)]
    shown = torch.ones(_BATCH, _TOKENS, dtype=torch.bool)
    own = tried(original_class(module).forward, twin, hidden, q_resid, shown, caches[0])
    found = tried(_choice_of_gated, twin, hidden, q_resid, caches[1])
    if not isinstance(own, Tensor) or not isinstance(found, Choice):
        return False
    keys = _BEFORE + _TOKENS
    mask = torch.zeros(_BATCH, _TOKENS, keys + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(own < 0, keys, own).long(), True)
    same = _is_same(mask[..., :keys].unsqueeze(1), found)
    return same and agrees(caches[0].keys, caches[1].keys)


def _is_same(own: Tensor, found: Choice) -> bool:
    """Whether a mask shows what is chosen, of tokens of which no two pools have a score of zero."""
    scores = torch.einsum("bthd,bsd->bhts", found.q, found.k).relu()
    known = (scores.sum(1) == 0).sum(-1) < 2
    keys = _BEFORE + _TOKENS
    order = torch.ones(_TOKENS, keys, dtype=torch.bool).tril(_BEFORE)
    mask = found.shown(None, 1, _TOKENS, keys)
    return bool(known.any()) and torch.equal((own & order)[:, 0][known], (mask & order)[:, 0][known])


def _turn_of_means(module: Any) -> Turn | None:
    """How queries and keys turn; None if an indexer chooses anything else."""
    sizes = {"compress_ratio": _RATE, "block_topk": _POOLS, "token_budget": _RATE * _POOLS}
    twin, width, keys = twin_of(module, **sizes), module.index_head_dim, _BEFORE + _TOKENS
    hidden = numbers(_BATCH, _TOKENS, twin.index_qk_proj.in_features)
    before = numbers(_BATCH, _BEFORE, width)
    both = numbers(_BATCH, keys, width // 2 + 1) + 1.0
    cache, tables = HeldKeys(before, twin.layer_idx), [both[..., :-1], both[..., 1:]]
    shown = torch.ones(keys, keys, dtype=torch.bool).tril()[-_TOKENS:].expand(_BATCH, 1, -1, -1)
    own = tried(original_class(module).forward, twin, hidden, tables, shown, cache)
    for turn in WHOLE_TURNS if isinstance(own, Tensor) else ():
        layer = HeldKeys(before)
        found = tried(_choice_of_means, twin, turn, hidden, tables, layer)
        if isinstance(found, Choice) and _is_same(own, found) and agrees(cache.keys, layer.keys):
            return turn
    return None
