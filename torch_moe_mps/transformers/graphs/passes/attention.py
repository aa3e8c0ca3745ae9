"""Attention, and the rotation in front."""

from torch import fx

from ..fakes import geometry
from ..nodes import arguments, calls, is_call, is_unchanged, memory_of, ours, put, tensor_of
from ..tracing import VALUE, as_recorded

# The arguments of attention that _rope_attention_ has, too, and what the others must be.
_OF_BOTH = ("q", "k", "v", "scale", "window", "key_range", "softcap", "sinks", "gate", "gate_activation")
_PLAIN = {
    **dict.fromkeys(("mask", "k_scales", "k_biases", "v_scales", "v_biases", "indices", "k_tail", "v_tail")),
    **{"index_block": 1, "lookahead": 0, "tail_rate": 1, "position": 0, "relative": None, "dtype": None},
}


def turn_in_attention(graph: fx.Graph) -> None:
    """attention(rope_cache_(Q, K, V), KEYS, VALUES) of a token -> _rope_attention_(Q, K, V, KEYS, VALUES)"""
    for call in calls(graph, ours.attention):
        passed, turning = arguments(call), arguments(call)["q"]
        if _is_of_one_token(call) and _is_the_same_behind(turning, call):
            rotation = arguments(turning)
            del rotation["k_bias"]
            held = {"keys_": passed["k"], "values_": passed["v"]}
            options = {name: passed[name] for name in _OF_BOTH if name not in "qkv"}
            new = rotation | held | options
            call.replace_all_uses_with(put(call, ours._rope_attention_.default, call.meta[VALUE], **new))
            graph.erase_node(call)
            graph.erase_node(turning)


def _is_of_one_token(call: fx.Node) -> bool:
    """True for plain attention of one token, whose rotation nothing else reads, to what that has written."""
    passed, turning = arguments(call), arguments(call)["q"]
    if not is_call(turning, ours.rope_cache_) or [*turning.users] != [call]:
        return False
    rotation, others = arguments(turning), {n: value for n, value in passed.items() if n not in _OF_BOTH}
    if tensor_of(turning).shape[2] != 1 or others != _PLAIN or rotation["k_bias"] is not None:
        return False
    if rotation["q"] is None or rotation["v"] is None:
        return False
    places = (rotation["keys_"], passed["k"]), (rotation["values_"], passed["v"])
    return all(_ends_with(cache, place) for place, cache in places)


def _is_the_same_behind(turning: fx.Node, call: fx.Node) -> bool:
    """True if a rotation reads and writes the same in front of a later call."""
    places = arguments(turning)["keys_"], arguments(turning)["values_"]
    return all(is_unchanged(place, turning, call, read=False) for place in places) and all(
        is_unchanged(node, turning, call) for node in turning.all_input_nodes
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
