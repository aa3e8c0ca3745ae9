"""Linear attention: the gates in front of it, the norm behind it, its state in a cache; and convolutions."""

from typing import Any

from torch import fx

from ..nodes import (
    arguments,
    aten,
    beneath,
    calls,
    changed,
    in_shape,
    is_call,
    is_final,
    is_read_once,
    is_unchanged,
    memory_of,
    ours,
    put,
    tensor_of,
)
from ..patterns import before_widening, match

_DECAY, _STRENGTH = "neg(exp(A_LOG)) * softplus(A + DT_BIAS)", "sigmoid(B)"


def keep_state(graph: fx.Graph) -> None:
    """A state whose copy is updated and copied back is updated in place."""
    *_, end = graph.nodes
    for back in calls(graph, aten.copy_):
        state, copy, _ = arguments(back).values()
        if not is_call(copy, aten.clone) or copy.args[0] is not state:
            continue
        alike = tensor_of(copy).stride() == tensor_of(state).stride()
        kept = any(memory_of(each) is copy for each in end.all_input_nodes)
        # Nothing sees that the state changes earlier, and that it changes with its copy.
        unseen = is_unchanged(state, copy, back, read=False) and is_unchanged(copy, back, end, read=False)
        if alike and unseen and not kept:
            back.replace_all_uses_with(state)
            graph.erase_node(back)
            copy.replace_all_uses_with(state)
            graph.erase_node(copy)


def input_in_convolution(graph: fx.Graph) -> None:
    """causal_conv1d_update_(X) + X -> causal_conv1d_update_(X, add_input), and without casts around it.

    What models compute in float32, and round to the dtype that X had, the operator computes likewise.
    """
    for conv in calls(graph, ours.causal_conv1d_update_):
        given, readers = arguments(conv), list(conv.users)
        terms = match("A + B", readers[0]) if len(readers) == 1 else None
        if terms and {*terms.values()} == {conv, given["x"]} and is_unchanged(given["x"], conv, readers[0]):
            readers[0].replace_all_uses_with(_replace(conv, conv, add_input=True))
            graph.erase_node(readers[0])
    for conv in calls(graph, ours.causal_conv1d_update_):
        readers, x = list(conv.users), before_widening(arguments(conv)["x"])
        if len(readers) != 1 or not is_call(readers[0], aten._to_copy) or not is_final(readers[0]):
            continue
        like = tensor_of(readers[0])
        if tensor_of(x).dtype == like.dtype != tensor_of(conv).dtype and is_unchanged(x, x, conv):
            made = put(conv, conv.target, like, **arguments(conv) | {"x": x})
            readers[0].replace_all_uses_with(made)
            graph.erase_node(readers[0])
            graph.erase_node(conv)


def gates_in_linear_attention(graph: fx.Graph) -> None:
    """The decay and strength of the gated delta rule from what they are computed of."""
    for call in calls(graph, ours.linear_attention_):
        given = arguments(call)
        if given["decay"] != "log" or given["beta_activation"] != "none":
            continue
        found = match(_DECAY, given["g"])
        found = found and match(_STRENGTH, given["beta"], found)
        if found is None:
            continue
        found = {name: before_widening(value) for name, value in found.items()}
        if found["A"].op == "get_attr":
            found["A"], found["DT_BIAS"] = found["DT_BIAS"], found["A"]
        pairs = (found["A"], given["g"]), (found["B"], given["beta"])
        if any(tensor_of(raw).shape != tensor_of(gate).shape for raw, gate in pairs):
            continue
        if found["A_LOG"].op != "get_attr" or found["DT_BIAS"].op != "get_attr":
            continue
        if not all(is_unchanged(found[name], found[name], call) for name in ("A", "B")):
            continue
        _replace(
            call, call, g=found["A"], beta=found["B"], decay="softplus", beta_activation="sigmoid",
            A_log=found["A_LOG"], dt_bias=found["DT_BIAS"],
        )  # fmt: skip


def norm_in_linear_attention(graph: fx.Graph) -> None:
    """rms_norm_gated(linear_attention_(...), GATE) -> linear_attention_(..., gate=GATE)"""
    for norm in calls(graph, ours.rms_norm_gated):
        given = arguments(norm)
        x, weight = given["input"], given["weight"]
        call = beneath(x)
        if not is_call(call, ours.linear_attention_) or not is_read_once(x, norm) or given["gate_first"]:
            continue
        inside, whole = arguments(call), given["group"] is None
        if inside["gate"] is not None or not whole or tensor_of(weight).shape != tensor_of(call).shape[-1:]:
            continue
        state = inside["state_"]
        if not all(is_unchanged(each, call, norm, each is not state) for each in call.all_input_nodes):
            continue
        gate = in_shape(given["gate"], call, norm)
        if gate is None or tensor_of(gate).dtype != tensor_of(call).dtype:
            continue
        new = _replace(
            call, norm, gate=gate, gate_activation=given["activation"],
            norm_weight=weight, norm_eps=given["eps"], norm_offset=given["weight_offset"],
        )  # fmt: skip
        result = in_shape(new, norm, norm)
        assert result is not None  # the norm's input was a view of the call's result
        norm.replace_all_uses_with(result)


def _replace(call: fx.Node, before: fx.Node, **new: Any) -> fx.Node:
    """Puts another call in the place of one that writes."""
    made = changed(call, before, **new)
    call.replace_all_uses_with(made)
    call.graph.erase_node(call)
    return made
