"""Attention to a window of tokens and to keys that stand for several tokens each.

A layer is recognised by its results: its own forward and the one here run on a small layer of its class,
for a prompt, tokens behind it and a few more, and have to give the same results and the same cache.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.causal_mask import CausalMask
from ...basics.guards import is_observed
from ...basics.report import Done
from ...basics.state import original_class, state_of
from ...basics.tensors import constant, derived
from ...caches.classes import growing_class
from ...modules.linears import GroupedLinear
from ...modules.rules.norms import is_norm
from ...modules.rules.rotary import is_fixed
from ...trials.comparing import agrees
from ...trials.draws import eager, normal
from ...trials.forms import Tried, made_alike
from ...upstream.models import DynamicCache
from .cache import GrowingCompressed

ops = torch.ops.moe_mps

_CHILDREN = (
    *("q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj"),
    "compressor",
)
_TURN: dict[str, Any] = {"pairs": "interleaved", "rotary_last": True}


def compressed_layer(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Any,
    attention_mask: Any,
    cache: Any = None,
    output_attentions: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """The forward of a layer that is recognised."""
    cache_layer, (_, *within) = _layer_of(cache, layer.layer_idx), layer.modules()
    unpadded = type(attention_mask) is CausalMask and attention_mask.key_range is None
    plain = attention_mask is None or unpadded
    if cache_layer is None or not plain or output_attentions or is_observed(*within):
        return NotImplemented
    tables = position_embeddings[layer.rope_layer_type]
    return _attended(layer, cache_layer, hidden_states, tables), None


def _layer_of(cache: Any, number: int) -> GrowingCompressed | None:
    """The layer of a cache that grows in place, whose tokens are in order; None without one."""
    layers = getattr(cache, "layers", ())
    cache_layer = layers[number] if number < len(layers) else None
    usable = (
        isinstance(cache_layer, GrowingCompressed) and cache_layer.is_in_order and not torch.is_grad_enabled()
    )
    return cache_layer if usable else None


def _attended(layer: Any, cache_layer: GrowingCompressed, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The result of attention over the keys of a window and the entries that represent earlier tokens."""
    cos, sin = tables
    compressor = layer.compressor
    indexer = compressor._modules.get("indexer")
    turn = _TURN | {"rotary_dim": 2 * cos.shape[-1]}
    latent = layer.q_a_norm(layer.q_a_proj(x))
    q, kv = layer.q_b_proj(latent).unflatten(-1, (-1, layer.head_dim)), layer.kv_proj(x).unsqueeze(2)
    ones = constant(("ones", layer.head_dim, q.device), lambda: torch.ones(layer.head_dim, device=q.device))
    weight, eps = layer.kv_norm.weight, layer.kv_norm.variance_epsilon
    keys = cache_layer.reserve(kv.transpose(1, 2))
    if keys is None:
        q, k = ops.rope(q, kv, cos, sin, ones, weight, norm_eps=eps, **turn)
        keys, _ = cache_layer.update(k, k)
    else:
        q = ops._rope_cache_(q, kv, None, keys, None, cos, sin, ones, weight, eps, **turn)
        keys, _ = cache_layer.take(keys, keys, x.shape[1])

    position = cache_layer.cumulative_length - x.shape[1]
    entries = _pooled(compressor, cache_layer, "compressor", x, position).unsqueeze(1)
    indices = None
    if indexer is not None:
        index_keys = _pooled(indexer, cache_layer, "indexer", x, position)
        if index_keys.shape[1] > indexer.index_topk:  # else it would choose all
            of_heads = indexer.q_b_proj(latent).unflatten(-1, (-1, indexer.head_dim))
            of_heads = ops.rope_heads(of_heads, cos, sin, **turn)
            weights = indexer.scorer.weights_proj(x)
            chosen = _chosen(indexer, of_heads.transpose(1, 2), index_keys, weights, cache_layer)
            indices = chosen.unsqueeze(1)
    out = ops._cached_attention(
        *(q, keys, keys),
        scale=layer.scaling,
        window=layer.sliding_window,
        sinks=layer.sinks,
        indices=indices,
        k_tail=entries,
        v_tail=entries,
        tail_rate=compressor.compress_rate,
        position=position,
    )
    return _projected(layer, out, cos, derived(sin, torch.neg), turn)


def _pooled(compressor: Any, cache_layer: GrowingCompressed, name: str, x: Tensor, position: int) -> Tensor:
    """All entries of a compressor [B, N, D], also the ones that the new tokens complete."""
    kv, gate = compressor.kv_proj(x), compressor.gate_proj(x)
    state, memory = cache_layer.buffers_for(name, kv, compressor.head_dim, compressor.position_bias)
    rotary, kind, norm = compressor.rotary_emb, compressor.rope_layer_type, compressor.kv_norm
    ops._pool_window_(
        *(kv, gate, compressor.position_bias, state, memory, position, norm.weight),
        *(getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling")),
        norm.variance_epsilon,
    )
    return cache_layer.compressed_kv[name]


def _chosen(indexer: Any, q: Tensor, k: Tensor, weights: Tensor, cache_layer: GrowingCompressed) -> Tensor:
    """[B, T, K]: the entries that an indexer chooses for each token."""
    scorer = indexer.scorer
    scale = scorer.softmax_scale * scorer.weights_scaling
    of_blocks = {"block": indexer.compress_rate, "keys": cache_layer.cumulative_length}
    return ops._index_topk(q, k, weights, indexer.index_topk, scale, **of_blocks)


def _projected(layer: Any, out: Tensor, cos: Tensor, sin: Tensor, turn: dict[str, Any]) -> Tensor:
    """The layer's output from what its heads have read [B, T, H, D], rotated back first."""
    batch, tokens, heads, width = out.shape
    tables = (table.expand(batch, -1, -1).reshape(batch * tokens, 1, -1) for table in (cos, sin))
    out = ops.rope_heads(out.view(batch * tokens, 1, heads, width), *tables, **turn)
    out = layer.o_a_proj(out.view(batch, tokens, layer.o_a_proj.n_groups, -1))
    return layer.o_b_proj(out.flatten(2))


# Recognising a layer


def rewrite_compressed_attention(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for attention to a window and to compressed keys, else None."""
    found = _LAYER(module)
    if found is None:
        return None
    state_of(module)
    children: dict[str, Any] = module._modules
    forward, operators = found
    operators += [Done("expert_qmm")] if isinstance(children["o_a_proj"], GroupedLinear) else []
    operators += [Done("_index_topk")] if "indexer" in children["compressor"]._modules else []
    return forward, operators


def _may_be(module: Any) -> bool:
    children: dict[str, Any] = module._modules
    if not all(isinstance(children.get(name), nn.Module) for name in _CHILDREN):
        return False
    compressor = children["compressor"]
    parts = [part for part in (compressor, compressor._modules.get("indexer")) if part is not None]
    if not all(_has_fixed_tables(part) for part in parts) or not is_norm(children["q_a_norm"], True):
        return False
    rates = [_frequencies(part) for part in parts]
    if not any(rate.is_meta for rate in rates) and not all(torch.equal(rates[0], rate) for rate in rates):
        return False
    return bool(module.kv_norm.variance_epsilon == module.q_b_norm.eps)


def _frequencies(part: Any) -> Tensor:
    rates: Tensor = getattr(part.rotary_emb, f"{part.rope_layer_type}_inv_freq")
    return rates


def _has_fixed_tables(part: Any) -> bool:
    kinds = getattr(part.rotary_emb, "rope_type", None)
    return isinstance(kinds, dict) and is_fixed(kinds.get(part.rope_layer_type, "dynamic"))


def _small(module: Any) -> Any:
    """A layer of the same class, with random numbers."""
    config = copy.deepcopy(module.config)
    sizes = {"hidden_size": 24, "head_dim": 16, "num_attention_heads": 4, "sliding_window": 5}
    sizes |= {"q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6}
    sizes |= {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 3}  # heads: no keys have equal scores
    tables = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}
    for name, value in sizes.items():
        setattr(config, name, value)
    config.rope_parameters = {name: dict(tables) for name in config.rope_parameters}
    config.compress_rates = rates
    config._attn_implementation = "eager"
    layer = original_class(module)(config, module.layer_idx).eval().float()
    for parameter in layer.parameters():
        parameter.data = normal(*parameter.shape) * (0.3 if parameter.dim() > 1 else 1.0)
    frequencies: dict[str, Tensor] = {}  # all parts share them
    for name, buffer in layer.named_buffers():
        buffer.data = frequencies.setdefault(name.rpartition(".")[2], torch.rand(buffer.shape))
    return layer


def _is_same(module: Any, forward: Callable) -> bool:
    """True if a forward gives what the layer's own gives: results, keys and entries."""
    with torch.device("meta"):  # a small one says nothing of a layer that was changed after it was made
        usual = original_class(module)(module.config, module.layer_idx)
    if not made_alike(module, usual):
        return False
    layer = _small(module)
    x = normal(2, 17, layer.config.hidden_size)
    tables = layer.compressor.rotary_emb(x, torch.arange(17)[None], layer_type=layer.rope_layer_type)
    window = layer.sliding_window
    is_norm(layer.q_a_norm)
    caches: Any = [DynamicCache(config=layer.config) for _ in range(2)]
    plain_layer, growing_layer = (cache.layers[layer.layer_idx] for cache in caches)
    plain: Any = type(growing_layer)
    growing_layer.__class__ = growing_class(plain)
    theirs, ours = [], []
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 17)):
        some = {layer.rope_layer_type: tuple(table[:, begin:end] for table in tables)}
        seen = min(begin, window - 1) + end - begin
        distance = torch.arange(seen - (end - begin), seen)[:, None] - torch.arange(seen)
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(2, 1, *distance.shape).masked_fill(hidden, -torch.inf)
        arguments = x[:, begin:end], some, torch.arange(begin, end)[None]
        theirs.append(eager(original_class(layer).forward)(layer, *arguments, mask, caches[0])[0])
        ours.append(forward(layer, *arguments, None, caches[1])[0])
    theirs += [plain_layer.keys, *plain_layer.compressed_kv.values()]
    ours += [growing_layer.keys, *growing_layer.compressed_kv.values()]
    return agrees(ours, theirs)


_LAYER = Tried(
    _may_be,
    compressed_layer,
    _is_same,
    (Done("_pool_window_"), Done("rope_heads"), Done("_cached_attention")),
)
