"""Attention to keys whose heads are repeated one after the other."""

from torch import fx

from ...graphs.nodes import arguments, aten, calls, in_shape, is_call, is_unchanged, ours, put, tensor_of
from ...graphs.patterns import match

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
