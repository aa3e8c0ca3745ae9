"""Attention, the rotation in front, and heads of keys that a model's code repeats."""

from typing import Any

from torch import fx

from ..fakes import geometry
from ..fusion import Fusion
from ..nodes import (
    arguments,
    aten,
    calls,
    in_shape,
    is_call,
    is_node,
    is_unchanged,
    memory_of,
    ours,
    put,
    tensor_of,
)
from ..patterns import match
from ..tracing import as_recorded


def _is_of_one_token(
    Q: Any, V: Any, KEYS: fx.Node, VALUES: fx.Node, CACHED_K: fx.Node, CACHED_V: fx.Node, **_: Any
) -> bool:
    """True for queries of one token to a cache that ends with what the rotation writes."""
    ends = is_node(Q) and is_node(V) and _ends_with(CACHED_K, KEYS) and _ends_with(CACHED_V, VALUES)
    return ends and tensor_of(Q).shape[1] == 1


turn_in_attention = Fusion(
    "turn_in_attention",
    *(
        (
            f"{name}(_rope_cache_(Q, K, V, KEYS, VALUES, COS, SIN, *R), CACHED_K, CACHED_V, *A)",
            "_rope_attention_(Q, K, V, CACHED_K, CACHED_V, COS, SIN, *R, *A)",
        )
        for name in ("cached_attention", "_cached_attention")
    ),
    where=_is_of_one_token,
)


def _ends_with(cache: fx.Node, place: fx.Node) -> bool:
    """True if the last token of a cache [B, H, S, D] lies at a place in the same buffer."""
    if memory_of(cache) is not memory_of(place):
        return False
    (shape, stride, offset), (other_shape, other_stride, other_offset) = (
        geometry(tensor_of(item)) for item in (cache, place)
    )
    ends = offset + shape[2] * stride[2], other_offset + other_shape[2] * other_stride[2]
    pairs = zip((*stride, ends[0]), (*other_stride, ends[1]), strict=True)
    alike = [*shape[:2], shape[3]] == [*other_shape[:2], other_shape[3]]
    return alike and all(str(as_recorded(one)) == str(as_recorded(other)) for one, other in pairs)


_TILED = (
    "cached_attention(Q, repeat(K, [1, N, 1, 1]), repeat(V, [1, N, 1, 1]), SCALE, attn_mask=MASK,"
    " key_range=RANGE, softcap=CAP)"
)


def repeats_as_tokens(graph: fx.Graph) -> None:
    """cached_attention(Q, repeat(K), repeat(V)) of one token -> that of K and V, a token for each repetition

    Repeated, key heads take turns: head h reads key head h % Hk, where the operator reads h // (Hq / Hk). N
    tokens of Hk heads do so, in the same memory, if each of them sees the last key.
    """
    for call in calls(graph, ours.cached_attention):
        repeats = [arguments(call)[name] for name in ("k", "v")]
        bound = match(_TILED, call)
        if bound is None or not all(is_call(repeat, aten.repeat) for repeat in repeats):
            continue
        q, keys, values, count, mask = (bound[name] for name in ("Q", "K", "V", "N", "MASK"))
        (batch, heads, tokens, width), like = tensor_of(q).shape, tensor_of(call)
        held = zip((keys, values), repeats, strict=True)
        is_for_all = mask is None or tensor_of(mask).shape[1] == 1
        if tokens != 1 or not is_for_all or not all(is_unchanged(*pair, call) for pair in held):
            continue
        rows = in_shape(q, [batch, count, heads // count, width], call)
        if rows is None:
            continue
        rotated = put(call, aten.transpose.int, tensor_of(rows).transpose(1, 2), rows, 1, 2)
        new = {"q": rotated, "k": keys, "v": values}
        if mask is None:
            new["lookahead"] = count - 1
        else:
            sizes = [-1, -1, count, -1]
            new["attn_mask"] = put(call, aten.expand.default, tensor_of(mask).expand(sizes), mask, sizes)
        result = like.new_empty(batch, count, heads // count, like.shape[3])
        shaped = in_shape(put(call, call.target, result, **arguments(call) | new), call, call)
        assert shaped is not None  # it is contiguous
        call.replace_all_uses_with(shaped)
