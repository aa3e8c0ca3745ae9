"""Linear attention: its states in a cache."""

from typing import NamedTuple

from torch import fx

from ..nodes import arguments, aten, calls, is_call, is_unchanged, memory_of, ours, put, tensor_of

_ALL = 2**63 - 1  # the end of a slice that has none


class _Convolution(NamedTuple):
    """A convolution over a state and new tokens, [B, C, T] each, and the slices of its input and output."""

    state: fx.Node
    new: fx.Node
    whole: fx.Node  # both, one behind the other
    cut: fx.Node  # the convolved tokens
    back: fx.Node  # the write of the state that the tokens leave
    inside: list[fx.Node]  # the calls between, the last first


def convolve_behind_state(graph: fx.Graph) -> None:
    """A convolution over a state and the tokens behind it, cut to these, is the operator's, which takes both.

    So several tokens of one conversation are convolved: the state is cut out of the same whole.
    """
    for conv in calls(graph, ours.causal_conv1d_update_):
        found = _convolution(conv)
        if found is None or tensor_of(found.new).shape[0] != 1:  # others would lie in memory in another way
            continue
        state, new, whole, cut, back, inside = found
        if (
            is_unchanged(state, whole, back)
            and is_unchanged(state, back, conv, read=False)
            and is_unchanged(new, whole, conv)
        ):
            tokens = put(conv, aten.transpose.int, tensor_of(new).mT, new, -2, -1)
            both = arguments(conv) | {"x": tokens, "conv_state_": state}
            made = put(conv, conv.target, tensor_of(cut).mT, **both)
            cut.replace_all_uses_with(put(conv, aten.transpose.int, tensor_of(cut), made, -2, -1))
            for node in (cut, *inside):
                graph.erase_node(node)


def _convolution(conv: fx.Node) -> _Convolution | None:
    given = arguments(conv)
    turned, zeros = given["x"], given["conv_state_"]
    if not is_call(turned, aten.transpose) or not is_call(zeros, aten.new_zeros):
        return None
    whole = turned.args[0]
    if not is_call(whole, aten.cat) or len(whole.args[0]) != 2 or len(whole.users) != 3:
        return None
    state, new = whole.args[0]
    kept = next(iter({*whole.users} - {turned, zeros}), whole)
    chain = [conv, turned, zeros, kept, out := next(iter(conv.users), conv)]
    if any(len(node.users) != 1 for node in chain):
        return None
    (cut,), (back,) = out.users, kept.users
    is_cut = is_call(out, aten.transpose) and _is_end(cut, out, new) and _is_end(kept, whole, state)
    if not is_cut or not is_call(back, aten.copy_) or back.args[:2] != (state, kept):
        return None
    return _Convolution(state, new, whole, cut, back, [out, conv, zeros, turned, back, kept, whole])


def _is_end(cut: fx.Node, whole: fx.Node, like: fx.Node) -> bool:
    """True if a node is the last of the tokens [.., C, T] of another, as many as a third has."""
    if not is_call(cut, aten.slice) or len(cut.args) != 4:
        return False
    source, dim, _, end = cut.args
    is_last = source is whole and dim in (2, -1) and end == _ALL
    return bool(is_last and tensor_of(cut).shape == tensor_of(like).shape)


def keep_state(graph: fx.Graph) -> None:
    """A state whose copy is updated and copied back is updated in place."""
    *_, end = graph.nodes
    for back in calls(graph, aten.copy_):
        state, copy, _ = arguments(back).values()
        if not is_call(copy, aten.clone) or copy.args[0] is not state:
            continue
        alike = tensor_of(copy).stride() == tensor_of(state).stride()
        kept = any(memory_of(node) is copy for node in end.all_input_nodes)
        # Nothing sees that the state changes earlier, and that it changes with its copy.
        unseen = is_unchanged(state, copy, back, read=False) and is_unchanged(copy, back, end, read=False)
        if alike and unseen and not kept:
            back.replace_all_uses_with(state)
            graph.erase_node(back)
            copy.replace_all_uses_with(state)
            graph.erase_node(copy)
