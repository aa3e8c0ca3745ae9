"""The rotation of queries and keys: what stands in front of `rope`, and the write into a cache behind it.

`rope` also does this for heads that do not turn. `rope_heads` takes one tensor, here `q` without `k`.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..nodes import (
    arguments,
    aten,
    calls,
    changed,
    hoist,
    in_shape,
    is_call,
    is_reshaped,
    is_same,
    is_unchanged,
    memory_of,
    ours,
    put,
    readers,
    shown,
    tensor_of,
    written,
)
from ..tracing import ITEM, VALUE

_TABLES = ("cos", "sin", "pairs", "rotary_dim", "rotary_last")
_OF_NORMS = ("norm_eps", "norm_weight_offset")
_ROTATIONS = (ours.rope, ours.rope_heads)


def turn_parts(graph: fx.Graph) -> None:
    """cat(A, rope(B)) -> rope(C), where A and B are the columns of C, in either order."""
    for call in calls(graph, *_ROTATIONS):
        passed, results = _passed(call), results_of(call)
        width = tensor_of(passed["cos"]).shape[-1] if passed["rotary_dim"] is None else passed["rotary_dim"]
        sides: set[bool] = set()
        new: dict[str, fx.Node] = {}
        for name in _given(call):
            if tensor_of(passed[name]).shape[-1] != width:
                sides.add(passed["rotary_last"])
            elif name in results and passed[f"{name}_norm_weight"] is None:
                whole = _whole(call, passed[name], results[name])
                if whole is not None:
                    new[name], results[name], is_last = whole
                    sides.add(is_last)
        if new and len(sides) == 1:
            _give(_changed(call, call, **new, rotary_last=sides.pop()), results)


def heads_that_do_not_turn(graph: fx.Graph) -> None:
    """cached_attention(Q, KEYS, VALUES) -> the same of rope(Q), and so K in its write; without tables.

    As parts of `rope` their norms and the writes into the cache are one dispatch.
    """
    copies = calls(graph, aten.copy_)
    for call in calls(graph, ours.cached_attention, ours._cached_attention):
        q, *cached = list(arguments(call).values())[:3]
        both = [
            [write for write in copies if memory_of(*written(write)) is memory_of(item)] for item in cached
        ]
        if [len(writes) for writes in both] != [1, 1] or both[0] == both[1]:
            continue
        (write,) = both[0]
        k: Any = write.args[1]
        q, reader = _heads_of(q, call, k)
        if write < q or not is_unchanged(q, write, call) or not _are_heads(q, k):
            continue
        results = [tensor_of(item).contiguous() for item in (q, k)]
        rows = (_swapped(item, write) for item in (q, k))
        new_call = put(write, ours.rope.default, results, *rows, None, None)
        for number, (one, old) in enumerate(((reader, q), (write, k))):
            one.replace_input_with(old, put(write, ITEM, results[number], new_call, number))


def norms_in_rotation(graph: fx.Graph) -> None:
    """rope(rms_norm(Q), rms_norm(K)) -> rope(Q, K, norms), or so for one of them."""
    for call in calls(graph, *_ROTATIONS):
        passed = _passed(call)
        for name in _given(call):
            norm = None if passed[f"{name}_norm_weight"] is not None else _norm_of(passed[name], call)
            if norm is None or norm.weight is None or norm.factor != 1.0:
                continue
            options = _options_of_both(passed, norm)
            if options is not None:
                passed |= {name: norm.x, f"{name}_norm_weight": norm.weight, **options}
        if passed != _passed(call):
            call.replace_all_uses_with(_changed(call, call, **passed))


def join_rotations(graph: fx.Graph) -> None:
    """rope_heads(Q), rope_heads(K) -> rope(Q, K), of the same tables."""
    for first, second in itertools.pairwise(calls(graph, ours.rope_heads)):
        results, last = results_of(first), results_of(second)
        if not (results and last):  # the first is one of a pair already
            continue
        passed, others = _passed(first), _passed(second)
        one, other = tensor_of(passed["q"]), tensor_of(others["q"])
        norm = _Norm(
            second, others["q"], others["q_norm_weight"], others["norm_eps"], others["norm_weight_offset"]
        )
        options = {} if norm.weight is None else _options_of_both(passed, norm)
        if (
            options is not None
            and all(passed[name] == others[name] for name in _TABLES)
            and (one.shape[:2], one.dtype) == (other.shape[:2], other.dtype)
            and not any(user < second for result in results.values() for user in result.users)
            and all(is_unchanged(node, first, second) for node in first.all_input_nodes)
        ):
            new = {"k": norm.x, "k_norm_weight": norm.weight, **options}
            _give(_changed(first, second, **new), results | {"k": last["q"]})


def write_into_cache(graph: fx.Graph) -> None:
    """rope(Q, K), and copies of K and of values V to where a cache keeps them -> _rope_cache_(Q, K, V).

    Latent attention keeps latents as keys and what turns as values, side by side. Rows that turn alone, as
    the pools of an indexer, are keys.
    """
    copies = calls(graph, aten.copy_)
    for call in calls(graph, ours.rope_heads):
        _write_alone(call)
    for call in calls(graph, ours.rope):
        for name, result in results_of(call).items():
            if any(_write(call, name, *w) for w in _writes(result, copies)):
                break
        if arguments(call)["cos"] is None and not any(
            arguments(call)[f"{name}_norm_weight"] for name in "qk"
        ):
            for name, result in results_of(call).items():  # nothing is left to do
                passed = arguments(call)[name]
                result.replace_all_uses_with(put(call, aten.transpose.int, tensor_of(result), passed, 1, 2))


class _Norm(NamedTuple):
    """A call of rms_norm, and its argument in the shape of the searched value."""

    call: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float
    factor: float = 1.0


class _Write(NamedTuple):
    """A call that writes a source to a place, [B, H, T, D]."""

    call: fx.Node
    place: fx.Node
    source: fx.Node


# The names of arguments of `rope_heads` in `rope`.
_IN_ROPE = {"x": "q", "norm_weight": "q_norm_weight"}


def _passed(call: fx.Node) -> dict[str, Any]:
    """Arguments of a rotation by the names of `rope`."""
    absent = {} if is_call(call, ours.rope) else {"k": None, "k_norm_weight": None}
    return absent | {_IN_ROPE.get(name, name): value for name, value in arguments(call).items()}


def _changed(call: fx.Node, before: fx.Node, /, **new: Any) -> fx.Node:
    """A rotation with other arguments, by the names of `rope`, in front of a node."""
    passed = _passed(call) | new
    if passed["k"] is not None:
        results = [call.meta[VALUE]] * 2 if is_call(call, ours.rope_heads) else call.meta[VALUE]
        return put(before, ours.rope.default, results, **passed)
    return changed(call, before, **{name: passed[_IN_ROPE.get(name, name)] for name in arguments(call)})


def _given(call: fx.Node) -> list[str]:
    return ["q", "k"] if is_call(call, ours.rope) else ["q"]


def _are_heads(q: fx.Node, k: fx.Node) -> bool:
    """True if `rope` takes these heads [B, H, T, D], and has not made one of them."""
    one, other = tensor_of(q), tensor_of(k)
    return (
        one.dim() == other.dim() == 4
        and (one.shape[0], one.shape[2], one.dtype) == (other.shape[0], other.shape[2], other.dtype)
        and one.shape[3] % 2 == other.shape[3] % 2 == 0
        and not any(is_call(memory_of(item), *_ROTATIONS) for item in (q, k))
    )


def _heads_of(q: fx.Node, reader: fx.Node, k: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Queries before the views that attention with summands for each head reads, and what reads them."""
    while not _are_heads(q, k) and is_reshaped(q) and len(q.users) == 1:
        q, reader = q.all_input_nodes[0], q
    return q, reader


def results_of(call: fx.Node) -> dict[str, fx.Node]:
    """{q, k: what a rotation makes of it}, if it is read."""
    if is_call(call, ours.rope_heads):
        return {"q": call} if call.users else {}
    items: list[Any] = [user for user in call.users if user.users]
    return {"qk"[item.args[1]]: item for item in items}


def _give(call: fx.Node, places: dict[str, fx.Node]) -> None:
    """Puts the results of a new rotation in the place of values."""
    if is_call(call, ours.rope_heads):
        call.meta[VALUE] = tensor_of(places["q"])
        places["q"].replace_all_uses_with(call)
        return
    call.meta[VALUE] = [*call.meta[VALUE]]
    for name, old in places.items():
        number = "qk".index(name)
        call.meta[VALUE][number] = tensor_of(old)
        old.replace_all_uses_with(put(call.next, ITEM, tensor_of(old), call, number))


def _whole(call: fx.Node, part: fx.Node, result: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Whole [B, T, H, D] of a part of heads that turns, the node that joins it, whether the part is its end.

    None if the result is read elsewhere, or joined with something else than the columns beside it.
    """
    join, *others = result.users
    if others or join.target != aten.cat.default or not tensor_of(join).is_contiguous():
        return None
    parts, dim = arguments(join).values()
    if len(parts) != 2 or parts.count(result) != 1 or dim not in (-1, 3):
        return None
    is_last = parts[1] is result
    beside = parts[0 if is_last else 1]
    if memory_of(beside) is not memory_of(part) or not is_unchanged(part, call, join):
        return None
    for source in shown(part):
        for swap in (False, True):
            if _consists_of(source, swap, tensor_of(part), tensor_of(beside), is_last):
                return _swapped(source, call) if swap else source, join, is_last
    return None


def _consists_of(source: fx.Node, swap: bool, part: Tensor, beside: Tensor, is_last: bool) -> bool:
    """True if heads, or their transpose with `swap`, are `part` [B, T, H, R] and `beside` [B, H, T, P]."""
    width, kept = part.shape[-1], beside.shape[-1]
    rows = tensor_of(source)
    if rows.dim() != 4 or rows.shape[-1] != width + kept or rows.shape[-1] % 2:
        return False
    if swap:
        rows = rows.transpose(1, 2)
    first, second = rows.split_with_sizes([kept, width] if is_last else [width, kept], -1)
    rotated, passed = (second, first) if is_last else (first, second)
    return _alike(rotated, part) and _alike(passed.transpose(1, 2), beside)


def _norm_of(value: fx.Node, reader: fx.Node) -> _Norm | None:
    """The norm over the last dimension that a value is, in any shape, if nothing but one reader reads it."""
    call, *views = _views_of_one_reader(value, reader)
    if not is_call(call, ours.rms_norm):
        return None
    x, weight, eps, offset, factor = arguments(call).values()
    width = tensor_of(x).shape[-1:]
    if any(tensor_of(view).shape[-1:] != width for view in views):
        return None
    if weight is not None and (weight.op != "get_attr" or tensor_of(weight).shape != width):
        return None
    if tensor_of(call).dtype != tensor_of(x).dtype or not is_unchanged(x, call, reader):
        return None
    for view in views:
        x = _seen(x, view, call)
        if x is None:
            return None
    return _Norm(call, x, weight, eps, offset, factor)


def _views_of_one_reader(value: fx.Node, reader: fx.Node) -> list[fx.Node]:
    """Views from a value back to its source, if `reader` alone reads each; else `reader`."""
    found = [reader]
    while list(value.users) == found[:1]:
        found.insert(0, value)
        if not is_call(value, aten.transpose) and not is_reshaped(value):
            break
        value = value.all_input_nodes[0]
    return found[:-1] or found


def _seen(x: fx.Node, view: fx.Node, before: fx.Node) -> fx.Node | None:
    """`x` with the shape or transposition of `view`; None if that copies, or moves the last dimension."""
    if not is_call(view, aten.transpose):
        return in_shape(x, view, before)
    _, *dims = arguments(view).values()
    if any(dim % tensor_of(x).dim() == tensor_of(x).dim() - 1 for dim in dims):
        return None
    return put(before, view.target, tensor_of(x).transpose(*dims), x, *dims)


def _options_of_both(passed: dict[str, Any], norm: _Norm) -> dict[str, Any] | None:
    """The options of the norms that a call has and of another one; None if they differ."""
    options = {name: passed[name] for name in _OF_NORMS}
    if passed["q_norm_weight"] is None and passed["k_norm_weight"] is None:
        return dict(zip(_OF_NORMS, (norm.eps, norm.offset), strict=True))
    has_offset = norm.weight is not None and norm.offset != options["norm_weight_offset"]
    return None if norm.eps != options["norm_eps"] or has_offset else options


def _writes(result: fx.Node, copies: list[fx.Node]) -> Iterator[tuple[_Write, _Write]]:
    """The write of a result into a cache, if nothing else reads it, and another one next to it."""
    call, *others = result.users
    if others:
        return
    passed = arguments(call)
    if is_call(call, aten.copy_) and passed["src"] is result:
        number = copies.index(call)
        for item in (*copies[number + 1 : number + 2], *copies[max(number - 1, 0) : number]):
            place, source, _ = arguments(item).values()
            yield _Write(call, passed["self"], result), _Write(item, place, source)
    elif call.target == aten.cat.out and len(passed["tensors"]) == 2 and passed["dim"] in (-1, 3):
        (first, second), out = passed["tensors"], passed["out"]
        width, whole = tensor_of(first).shape[-1], tensor_of(out).shape[-1]
        left, right = (
            _Write(call, put(call, aten.slice.Tensor, tensor_of(out)[..., a:b], out, -1, a, b), source)
            for source, a, b in ((first, 0, width), (second, width, whole))
        )
        yield (left, right) if first is result else (right, left)


def _write(call: fx.Node, name: str, rotated: _Write, other: _Write) -> bool:
    """Lets the operator do two writes, the first one of a result of `rope`. Returns: whether it can."""
    queries = "q" if name == "k" else "k"
    v, reader, options = _values_of(call, other)
    behind = max(call, memory_of(v)).next  # early: readers of the queries come later
    q = results_of(call).get(queries)
    if not (
        _fit(rotated, other, v)
        and _are_written_once(rotated, other, [*call.all_input_nodes, v])
        and (q is None or all(user >= behind for user in q.users))
        and all(is_unchanged(node, call, behind) for node in call.all_input_nodes)
        and is_same(v, reader, behind)
        and all(is_same(one.place, one.call, behind, read=False) for one in (rotated, other))
    ):
        return False
    passed = arguments(call)
    new_call = put(
        behind, ours._rope_cache_.default, call.meta[VALUE]["qk".index(queries)],
        q=passed[queries], k=passed[name], v=v, keys_=rotated.place, values_=other.place,
        q_norm_weight=passed[f"{queries}_norm_weight"], k_norm_weight=passed[f"{name}_norm_weight"],
        **options,
    )  # fmt: skip
    for item in new_call.all_input_nodes:
        hoist(item, new_call)
    new_call.update_kwarg("v", _swapped(v, new_call))
    for item in {rotated.call, other.call}:
        call.graph.erase_node(item)
    if q is not None:
        q.replace_all_uses_with(new_call)
    return True


def _values_of(call: fx.Node, write: _Write) -> tuple[fx.Node, fx.Node, dict[str, Any]]:
    """Values written beside a call's result, before their norm if the operator can have it; their reader; and
    the operator's options.
    """
    passed = arguments(call)
    options = {name: passed[name] for name in _TABLES + _OF_NORMS}
    norm = _norm_of(write.source, write.call)
    shared = None if norm is None else _options_of_both(passed, norm)
    if norm is None or shared is None:
        return write.source, write.call, options
    of_values = {"norm_v": True, "v_norm_weight": norm.weight, "v_norm_factor": norm.factor}
    return norm.x, norm.call, options | shared | of_values


def _are_written_once(rotated: _Write, other: _Write, read: list[fx.Node]) -> bool:
    """True if two writes go into buffers of a call's arguments, and nothing else reads these."""
    memories = {memory_of(rotated.place), memory_of(other.place)}
    return (
        not rotated.call.users
        and not other.call.users
        and len(memories) == (1 if rotated.call is other.call else 2)
        and all(memory.op == "placeholder" for memory in memories)
        and not any(memory_of(one) in memories for one in read)
    )


def _write_alone(call: fx.Node) -> None:
    """rope_heads(K), which only a copy to where a cache keeps it reads, in any shape -> _rope_cache_(K)"""
    passed = _passed(call)
    for result in results_of(call).values():
        (write, source), *others = readers(result)
        if others or not is_call(write, aten.copy_) or write.users or arguments(write)["src"] is not source:
            return
        place = arguments(write)["self"]
        memory, like = memory_of(place), tensor_of(result)
        kept = in_shape(place, result, write) if tensor_of(place).shape == tensor_of(source).shape else None
        if (
            kept is None
            or memory.op != "placeholder"
            or (tensor_of(place).dtype, tensor_of(place).device) != (like.dtype, like.device)
            or any(memory_of(item) is memory for item in call.all_input_nodes)
            or not all(is_unchanged(item, call, write) for item in call.all_input_nodes)
        ):
            return
        options = {name: passed[name] for name in _TABLES + _OF_NORMS}
        put(
            write, ours._rope_cache_.default, like.new_empty(0), q=None, k=passed["q"], v=None, keys_=kept,
            values_=None, q_norm_weight=None, k_norm_weight=passed["q_norm_weight"], **options,
        )  # fmt: skip
        call.graph.erase_node(write)


def _fit(rotated: _Write, other: _Write, v: fx.Node) -> bool:
    """True if the operator can do two writes, the second of rows v [B, H, T, D]."""
    tensors = [tensor_of(item) for item in (rotated.source, rotated.place, other.place, v)]
    k, keys, values, rows = tensors
    if any(tensor.dim() != 4 or (tensor.dtype, tensor.device) != (k.dtype, k.device) for tensor in tensors):
        return False
    alike = k.shape == keys.shape and rows.shape == values.shape == tensor_of(other.source).shape
    return alike and (k.shape[0], k.shape[2]) == (rows.shape[0], rows.shape[2]) and rows.shape[3] % 2 == 0


def _swapped(x: fx.Node, before: fx.Node) -> fx.Node:
    """x.transpose(1, 2), in front of a node."""
    if is_call(x, aten.transpose) and x.args[1:] == (1, 2):
        return x.args[0]  # type: ignore[return-value]  # a tensor
    return put(before, aten.transpose.int, tensor_of(x).transpose(1, 2), x, 1, 2)


def _alike(one: Tensor, other: Tensor) -> bool:
    """True if two views of one buffer have the same elements."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    same = one.shape == other.shape and one.dtype == other.dtype
    return (
        same
        and one.storage_offset() == other.storage_offset()
        and all(n == 1 or a == b for n, a, b in strides)
    )
