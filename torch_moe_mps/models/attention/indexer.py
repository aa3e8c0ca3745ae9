"""Indexers of sparse attention, which choose the keys that a token reads.

While a token may choose all of its keys, an indexer only adds its own keys to the cache. Beyond that the
operator `_index_topk` chooses, without scores for each head. What an indexer computes in front of that is
recognised by running it with other numbers.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.families.index import MAX_INDEX_WIDTH
from ..basics.guards import is_observed
from ..basics.report import Done
from ..basics.state import STATE, original_class, state_of
from ..basics.tensors import constant, notes_on
from ..caches.held import HeldIndex
from ..modules.rules.rope import TURNS, Turn, tables_and_options
from ..trials.draws import eager
from ..trials.forms import has_parts
from ..trials.indexers import IndexerTrial, form_by_trial
from ..trials.replicas import LEAST_HEADS, HeldKeys, numbers, replica_of, untied
from ..upstream.calls import CACHE, cache_name
from .causal_mask import CausalMask
from .chosen_keys import Choice

ops = torch.ops.moe_mps

_LAYERS = ("wq_b", "wk", "k_norm", "weights_proj")
_NUMBERS = ("n_heads", "head_dim", "index_topk", "softmax_scale", "layer_idx")
_TAKEN = {"q_resid", "position_embeddings", "attention_mask", "position_ids", CACHE}
_BATCH, _TOKENS, _BEFORE = 16, 3, 4  # sizes of a trial; its rows with equal scores do not count


class IndexerForm(NamedTuple):
    """Form of an indexer: the computation of its queries and keys.

    Attributes:
        names: of what its forward takes behind the hidden states, the cache as CACHE.
        turn: the form of `rope` for both, None if they do not turn.
        rotary: the width of its tables.
    """

    names: tuple[str, ...]
    turn: Turn | None
    rotary: int


def indexer_forward(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    cache: Any,
    q_resid: Any = None,
    position_ids: Any = None,
) -> Tensor:
    """The forward of a rewritten indexer: [B, T, K] int32, -1 where a token may choose from fewer keys."""
    form: IndexerForm = indexer.__dict__[STATE].formula
    mask, (cos, _) = attention_mask, position_embeddings
    arguments = {"q_resid": q_resid, "position_embeddings": position_embeddings, "position_ids": position_ids}
    arguments = {name: value for name, value in arguments.items() if name in form.names} | {CACHE: cache}
    # Our implementation of attention asks for numbers. Beside a mask of bool, that of `sdpa`, a model
    # scatters the result, which takes no -1.
    runs = type(mask) is CausalMask and mask.window is None and mask.dtype is not torch.bool
    if not runs or hidden_states.dtype is torch.float64 or cos.shape[-1] != form.rotary:
        return NotImplemented
    seen, device = mask.seen, hidden_states.device
    choice = _choice(indexer, form, hidden_states, arguments, seen)
    if choice is None:
        # Programs hold these numbers, so they are as many as an indexer can choose.
        count = indexer.index_topk
        every = constant(
            ("keys", device), lambda: torch.arange(count, dtype=torch.int32, device=device), count
        )
        return every[:seen].expand(*hidden_states.shape[:2], seen)
    q, k, weights, top_k, scale, *_ = choice
    chosen: Tensor = ops._index_topk(q, k, weights, top_k, scale, key_range=mask.key_range)
    notes_on(chosen).is_in_order = True
    return chosen


def _choice(
    indexer: Any, form: IndexerForm, hidden: Tensor, arguments: dict[str, Any], seen: int
) -> Choice | None:
    """Adds the new keys to the cache. Returns: None where tokens may choose all keys."""
    chooses = seen > indexer.index_topk
    q = _queries(indexer, hidden, arguments) if chooses else None
    q, k = _into_cache(indexer, form, q, indexer.wk(hidden), arguments)
    if q is None:
        return None
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    return Choice(q, k[:, :seen], weights, indexer.index_topk, scale, 1, {})


def _into_cache(
    indexer: Any, form: IndexerForm, q: Tensor | None, k: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor | None, Tensor]:
    """The queries, rotated; the keys k [B, T, D], normed and rotated, behind the cached ones."""
    norm, cache, dtype = indexer.k_norm, arguments.get(CACHE), k.dtype
    cos, sin, options = None, None, dict[str, Any]()  # where nothing turns
    if form.turn is not None:
        cos, sin, options = tables_and_options(form.turn, *arguments["position_embeddings"])
    layer: Any = None if cache is None else cache.layers[indexer.layer_idx]
    writes = isinstance(layer, HeldIndex) and original_class(norm) is nn.LayerNorm and not is_observed(norm)
    reserved = layer.reserve_index(k) if writes else None
    if reserved is not None:
        turning = None if cos is None else q
        out = ops._rope_cache_(
            *(turning, k.unsqueeze(2), None, reserved.unsqueeze(1), None),
            *(cos, sin, None, norm.weight, norm.eps),
            k_bias=norm.bias,
            **options,
        )
        return q if turning is None else out.transpose(1, 2), layer.take_index(reserved)
    k = norm(k.to(norm.weight.dtype)).to(dtype).unsqueeze(2)
    if cos is not None and q is None:
        k = ops.rope_heads(k, cos, sin, **options).transpose(1, 2)
    elif cos is not None:
        q, k = (x.transpose(1, 2) for x in ops.rope(q, k, cos, sin, **options))
    k = k.squeeze(2)
    return q, k if cache is None else cache.update_indexer(k, indexer.layer_idx)


def _queries(indexer: Any, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """[B, T, Hi, D], which have not rotated."""
    children = indexer._modules
    x = arguments["q_resid"] if "q_resid" in arguments else children["q_input_norm"](hidden)
    q: Tensor = indexer.wq_b(x).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    scaling = children.get("softmax_scaling")
    return q if scaling is None else scaling(q, arguments["position_ids"], head_dim_first=False)


# Recognising an indexer


def rewrite_indexer(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an indexer, else None."""
    if not has_parts(module, _LAYERS, _NUMBERS):
        return None
    eager_forward = original_class(module).forward
    _, _, *names = (
        CACHE if n == cache_name(eager_forward) else n for n in inspect.signature(eager_forward).parameters
    )
    rotary, width = getattr(module, "qk_rope_head_dim", None), getattr(module, "head_dim", 0)
    fits = {*names} <= _TAKEN and {*names} >= _TAKEN - {"q_resid", "position_ids"}
    heads: Any = module.n_heads
    if (
        not fits
        or heads < LEAST_HEADS
        or not isinstance(rotary, int)
        or not 0 < rotary <= width <= MAX_INDEX_WIDTH
    ):
        return None
    forms = [IndexerForm(tuple(names), turn, rotary) for turn in (None, *TURNS) if _fits(turn, rotary, width)]
    form = form_by_trial(module, forms, _trial, tuple(names), rotary, width)
    if form is None:
        return None
    state_of(module).formula = form
    return indexer_forward, [Done("_index_topk"), Done("_rope_cache_")]


def _fits(turn: Turn | None, rotary: int, width: int) -> bool:
    """True if a turn by tables of a width stays within the heads."""
    columns = 0 if turn is None else rotary // (2 if turn.half_of_table else 1)
    return turn is None or columns * (2 if turn.doubled else 1) <= width


def _trial(module: nn.Module, names: tuple[str, ...], rotary: int, width: int) -> IndexerTrial:
    """A trial of an indexer whose layers have few inputs."""
    replica, forward = replica_of(module, index_topk=3), original_class(module).forward
    eager_forward = eager(forward)
    keys = _BEFORE + _TOKENS
    hidden, before = numbers(_BATCH, _TOKENS, replica.wk.in_features), numbers(_BATCH, _BEFORE, width)
    every = {
        "q_resid": numbers(_BATCH, _TOKENS, replica.wq_b.in_features + 1)[..., 1:],
        "position_embeddings": numbers(2, _BATCH, _TOKENS, rotary).unbind(),
        "attention_mask": torch.full((_BATCH, _TOKENS, keys), -torch.inf).triu(_BEFORE + 1),
        "position_ids": torch.arange(_BEFORE, keys).expand(_BATCH, -1) * 1000,
    }
    arguments = {name: value for name, value in every.items() if name in names}
    return IndexerTrial(
        held=lambda: HeldKeys(before, replica.layer_idx),
        own=lambda cache: eager_forward(replica, hidden, **arguments, **{str(cache_name(forward)): cache}),
        ours=lambda form, cache: _choice(replica, form, hidden, arguments | {CACHE: cache}, keys),
        is_same=_is_same,
    )


def _is_same(expected: Tensor, found: Choice) -> bool:
    known = untied(found.q, found.k)
    chosen = found.chosen(0, _TOKENS, _BEFORE + _TOKENS)
    return bool(known.any()) and torch.equal(expected.sort(-1).values[known], chosen[known])
