"""Attention, and the rotation in front."""

from torch import fx

from ..fakes import geometry
from ..nodes import arguments, calls, is_call, is_unchanged, memory_of, ours, put, tensor_of
from ..tracing import VALUE, as_recorded

# The arguments of attention that rope_attention_ has, too, and what the others must be.
_OF_BOTH = ("q", "k", "v", "scale", "window", "key_range", "softcap", "sinks", "gate", "gate_activation")
_PLAIN = {
    **dict.fromkeys(("mask", "k_scales", "k_biases", "v_scales", "v_biases", "indices", "k_tail", "v_tail")),
    **{"index_block": 1, "lookahead": 0, "tail_rate": 1, "position": 0, "relative": None, "dtype": None},
}


def turn_in_attention(graph: fx.Graph) -> None:
    """attention(rope_cache_(Q, K, V), KEYS, VALUES) of one token -> rope_attention_(Q, K, V, KEYS, VALUES)"""
    for call in calls(graph, ours.attention):
        passed, turning = arguments(call), arguments(call)["q"]
        if not is_call(turning, ours.rope_cache_) or [*turning.users] != [call]:
            continue
        others = {name: value for name, value in passed.items() if name not in _OF_BOTH}
        if tensor_of(turning).shape[2] != 1 or others != _PLAIN:
            continue
        rotation = arguments(turning)
        if rotation.pop("k_bias") is not None or rotation["q"] is None or rotation["v"] is None:
            continue
        places = (rotation["keys_"], passed["k"]), (rotation["values_"], passed["v"])
        if not all(_ends_with(cache, place) for place, cache in places):
            continue
        if not all(is_unchanged(place, turning, call, read=False) for place, _ in places):
            continue
        if not all(is_unchanged(node, turning, call) for node in turning.all_input_nodes):
            continue
        held = {"keys_": passed["k"], "values_": passed["v"]}
        options = {name: passed[name] for name in _OF_BOTH if name not in "qkv"}
        like = call.meta[VALUE]
        call.replace_all_uses_with(put(call, ours.rope_attention_.default, like, **rotation | held | options))
        graph.erase_node(call)
        graph.erase_node(turning)


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
