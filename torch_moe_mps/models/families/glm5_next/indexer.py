"""An indexer that chooses pools of keys, which it weighs by gates. Padded rows run the model's eager code."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.chosen_keys import Choice
from ...attention.pools import BATCH, BEFORE, POOLS, RATE, TOKENS, fits, is_same, layer_of, pools_of
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import original_class
from ...basics.tensors import constant, derived
from ...caches.held import HeldPools
from ...trials.draws import eager, is_first_kind
from ...trials.forms import has_parts
from ...trials.indexers import IndexerTrial, form_by_trial
from ...trials.replicas import HeldKeys, numbers, replica_of
from .mask import EVERYTHING

_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
_NUMBERS = ("n_heads", "head_dim", "index_topk", "index_kpool", "softmax_scale", "layer_idx")


def kpool_forward(
    indexer: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, cache: Any
) -> Any:
    """The forward of a rewritten indexer: a Choice, or EVERYTHING where tokens may choose all pools."""
    layer = layer_of(indexer, cache)
    runs = (
        indexer.config._attn_implementation == "sdpa"
        and hidden_states.dtype is not torch.float64
        and (layer is None or isinstance(layer, HeldPools))
        and not is_observed(indexer.k_norm)
    )
    if not runs or _is_padded(attention_mask, layer):
        if not runs and isinstance(layer, HeldPools):
            layer.is_padded = None  # nothing has looked at this call's mask
        return NotImplemented
    return _choice(indexer, hidden_states, q_resid, layer)


def _choice(indexer: Any, hidden_states: Tensor, q_resid: Tensor, layer: Any) -> Any:
    """The choice among pools of keys; EVERYTHING if there are too few to choose from."""
    width, rate = indexer.head_dim, indexer.index_kpool
    k = indexer.wk(hidden_states)
    gate = F.linear(hidden_states, indexer.index_kpool_compress_gate)
    one = constant(("one", k.device, k.dtype), lambda: k.new_ones(1, 1, 1))
    shown = one.expand(*k.shape[:2], 1)
    packed = (indexer.k_norm(k), gate, shown)
    reserved = None if layer is None else _written_keys(layer, packed)
    if reserved is not None:
        keys = layer.take_index(reserved)
    else:
        keys = torch.cat(packed, -1)
        keys = keys if layer is None else layer.update_indexer(keys)
    top_k = indexer.index_topk // rate
    if keys.shape[1] // rate <= top_k:
        return EVERYTHING
    pools = pools_of(layer, keys, rate, functools.partial(_weighted, indexer, keys))
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, width))
    weights = indexer.weights_proj(hidden_states)
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    return Choice(q, pools, weights, top_k, scale, rate, {"tail": 1}, is_pooled=True)


def _written_keys(layer: HeldPools, columns: Sequence[Tensor]) -> Tensor | None:
    """View of the cached keys and of new ones, which consist of `columns`; None without capacity."""
    batch, tokens, _ = columns[0].shape
    width = sum(part.shape[2] for part in columns)
    reserved = layer.reserve_index(columns[0].new_empty(1).expand(batch, tokens, width))
    if reserved is not None:
        torch.cat(list(columns), -1, out=reserved.narrow(1, reserved.shape[1] - tokens, tokens))
    return reserved


def _hides_any(mask: Tensor) -> bool:
    return not bool(mask.all())


def _is_padded(mask: Tensor, layer: HeldPools | None) -> bool:
    """True if any row of a batch has or had padding. A single token is none."""
    noted = None if layer is None else layer.is_padded
    keys = None if layer is None else layer.indexer_keys
    if noted is None and keys is not None and keys.shape[1] > 0:  # the model's eager code has written it
        noted = not bool(keys[..., -1].all())  # the column that says which keys are shown
    if not noted and mask.shape[1] > 1:
        noted = derived(mask, _hides_any)
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


# Recognising an indexer


def rewrite_kpool_indexer(module: Any) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an indexer of pools that are weighed, else None."""
    has = has_parts(module, _PARTS, _NUMBERS) and getattr(module, "index_kpool_always_select_tail", False)
    if (
        not has
        or not isinstance(module.k_norm, nn.LayerNorm)
        or not fits(module.n_heads, module.head_dim, module.index_kpool)
    ):
        return None
    return (kpool_forward, [Done("_index_topk")]) if form_by_trial(module, (True,), _trial) else None


def _trial(module: Any) -> IndexerTrial:
    """A trial of the one form that there is."""
    replica, width = replica_of(module, index_topk=RATE * POOLS, index_kpool=RATE), module.head_dim
    replica.index_kpool_compress_ape = nn.Parameter(numbers(RATE, width), requires_grad=False)
    cached_tokens = BEFORE if is_first_kind() else 0  # else a prompt: its first tokens see no pool
    tokens = BEFORE + TOKENS - cached_tokens
    hidden, q_resid = (numbers(BATCH, tokens, layer.in_features) for layer in (replica.wk, replica.wq_b))
    before = torch.cat((numbers(BATCH, cached_tokens, 2 * width), torch.ones(BATCH, cached_tokens, 1)), -1)
    shown = torch.ones(BATCH, tokens, dtype=torch.bool)
    forward = eager(original_class(module).forward)

    padded = shown.clone()  # `kpool_forward` leaves such rows to eager code, whose branches they take
    padded[0], padded[1, 0] = False, False
    assert _is_padded(padded, None)

    def own(cache: HeldKeys) -> Any:
        hidden_keys = torch.cat((before[..., :-1], padded[:, :1].expand(-1, cached_tokens)[..., None]), -1)
        forward(replica, hidden, q_resid, padded, HeldKeys(hidden_keys, replica.layer_idx))
        return forward(replica, hidden, q_resid, shown, cache)

    return IndexerTrial(
        held=lambda: HeldKeys(before, replica.layer_idx),
        own=own,
        ours=lambda _, layer: _choice(replica, hidden, q_resid, layer),
        is_same=_is_same,
    )


def _is_same(expected: Tensor, choice: Choice) -> bool:
    """True if the indices of keys, -1 for none, belong to the selected pools."""
    keys = BEFORE + TOKENS
    mask = torch.zeros(*expected.shape[:2], keys + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(expected < 0, keys, expected).long(), True)
    return is_same(mask[..., :keys].unsqueeze(1), choice)
