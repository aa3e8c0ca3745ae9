"""Chains of operations on elements: one dispatch for all of them."""

import heapq
import math
from typing import Any

import torch
from torch import fx

from ....ops._checks import dtype_name
from ....ops.families.pointwise import DTYPES, INPUTS, MAX_NUMBERS, MAX_RANK, MAX_STEPS, UNARY
from ..nodes import (
    arguments,
    aten,
    beneath,
    is_call,
    is_node,
    is_reshaped,
    is_unchanged,
    of_shape,
    ours,
    put,
    tensor_of,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_READ = (*_NAMES, torch.int32, torch.int64)
_UNARY = {getattr(aten, name): name for name in UNARY if name != "to"}
_UNARY |= {aten._to_copy: "to", aten.clone: "to"}
_BINARY = {aten.add: "add", aten.sub: "sub", aten.mul: "mul", aten.div: "div"}
_BINARY |= {aten.maximum: "max", aten.minimum: "min"}
Step = tuple[Any, ...]  # an operation, and the places of its operands; None is the step before
# {call: its steps}
_STEPS: dict[Any, tuple[Step, ...]] = {packet: ((name, 0),) for packet, name in _UNARY.items()}
_STEPS |= {packet: ((name, 0, 1),) for packet, name in _BINARY.items()}
_STEPS |= {aten.pow: (("mul", 0, 0),)}
# Values that other arguments must have, as far as a call has them.
_FIXED = {"alpha": 1, "beta": 1, "rounding_mode": None, "threshold": 20, "exponent": 2}
# For each dimension of a value, that of the result; None where the value has size 1 and is repeated.
Dims = tuple[int | None, ...]


def join_elements(graph: fx.Graph) -> None:
    """mul(sigmoid(GATE), X) -> _pointwise(GATE, "sigmoid a bf16; mul %0 b bf16", X) in bfloat16"""
    place = {node: number for number, node in enumerate(graph.nodes)}
    joined: set[fx.Node] = set()
    for root in reversed(list(place)):
        if root in joined or _operation(root) is None or not tensor_of(root).is_contiguous():
            continue
        if tensor_of(root).dim() > MAX_RANK:
            continue
        group = _Group(root, place)
        if len(group.members) > 1:
            joined.update(group.members)
            root.replace_all_uses_with(group.call())


def split_dimensions(graph: fx.Graph) -> None:
    """F(view(G(X))) -> view(F(G(X))) or F(G(view(X))): a chain has one shape, with most dimensions."""
    nodes = [*graph.nodes]
    for call in (*nodes, *reversed(nodes)):  # to what reads it, and to what it reads
        if _operation(call) is None or not tensor_of(call).is_contiguous():
            continue
        shape = tensor_of(call).shape
        behind = [user for user in call.users if _is_shaped(user)]
        shapes = [tensor_of(user).shape for user in behind if any(map(_operation, _users(user)))]
        sources = [beneath(operand) for operand in _operands(call) if is_node(operand)]
        shapes += [tensor_of(source).shape for source in sources if _operation(source) is not None]
        fine = max(shapes, key=_rank, default=shape)
        parts = _parts(shape, fine) if _rank(shape) < _rank(fine) and len(fine) <= MAX_RANK else None
        if parts is None:
            continue
        args: Any = fx.node.map_arg(call.args, lambda item: _split(item, parts, call))  # noqa: B023
        new = put(call, call.target, tensor_of(call).view(fine), *args, **call.kwargs)
        for user in behind:
            if tensor_of(user).shape == fine:
                user.replace_all_uses_with(new)
        call.replace_all_uses_with(put(call, aten.view.default, tensor_of(call), new, list(shape)))


def _rank(shape: Any) -> int:
    return sum(type(size) is not int or size != 1 for size in shape)


def _parts(shape: Any, fine: Any) -> list[list[int]] | None:
    """Sizes that each dimension of `shape` is split into in `fine`; None if it is no such split."""
    if not all(type(size) is int and size > 0 for size in (*shape, *fine)):
        return None
    left, parts = list(fine), list[list[int]]()
    for size in shape:
        part: list[int] = []
        while left and (math.prod(part) < size or (size == 1 and not part and left[0] == 1)):
            part.append(left.pop(0))
        if math.prod(part) != size:
            return None
        parts.append(part)
    return None if left else parts


def _split(value: fx.Node, parts: list[list[int]], before: fx.Node) -> fx.Node:
    """An operand in the shape whose dimensions are parts of its own."""
    sizes = tensor_of(value).shape
    behind = zip(sizes, parts[len(parts) - len(sizes) :], strict=True)
    shape = [n for size, part in behind for n in (part if size == math.prod(part) else [1] * len(part))]
    source = of_shape(value, shape)
    if source is not None:
        return source
    return put(before, aten.view.default, tensor_of(value).view(shape), value, shape)


class _Group:
    """A call and what only leads to it, as long as one dispatch can compute all."""

    def __init__(self, root: fx.Node, place: dict[fx.Node, int]):
        self.root, self._place = root, place
        self.members: dict[fx.Node, Dims] = {root: tuple(range(tensor_of(root).dim()))}
        waiting = [(-place[one], dims, one) for one, dims in self._sources(root)]
        heapq.heapify(waiting)
        seen: set[fx.Node] = set()
        while waiting:
            _, dims, node = heapq.heappop(waiting)
            if node in seen or not self._fits(node):
                continue
            seen.add(node)
            self.members[node] = dims
            if self._formula() is None:
                del self.members[node]
                continue
            for item, of_each in self._sources(node):
                heapq.heappush(waiting, (-place[item], of_each, item))

    def _fits(self, node: fx.Node) -> bool:
        if _operation(node) is None or not all(user in self.members for user in _users(node)):
            return False
        return all(is_unchanged(operand, node, self.root) for operand in _operands(node) if is_node(operand))

    def _sources(self, member: fx.Node) -> list[tuple[fx.Node, Dims]]:
        """Inputs of a member, before views, and how their dimensions go with the result's."""
        nodes = filter(is_node, _operands(member))
        sources = [_before_views(node, self._dims(node, member)) for node in nodes]
        return [source for source in sources if source[0].op == "call_function"]

    def _dims(self, operand: fx.Node, member: fx.Node) -> Dims:
        shape, of_member = tensor_of(operand).shape, self.members[member]
        behind = of_member[len(of_member) - len(shape) :]
        return tuple(None if size == 1 else dim for size, dim in zip(shape, behind, strict=True))

    def _formula(self) -> tuple[list[str], dict[tuple[fx.Node, Dims], str]] | None:
        """The steps, and the names of inputs; None for too many, or for a member that is read in two ways."""
        steps: dict[fx.Node, str] = {}
        formula: list[str] = []
        inputs: dict[tuple[fx.Node, Dims], str] = {}
        numbers: set[str] = set()
        for member in sorted(self.members, key=self._place.__getitem__):
            named = []
            for operand in _operands(member):
                if not is_node(operand):
                    named.append(repr(float(operand)))
                    numbers.add(named[-1])
                    continue
                dims = self._dims(operand, member)
                source, before = _before_views(operand, dims)
                if source in steps:
                    if self.members[source] != before:
                        return None
                    named.append(steps[source])
                    continue
                inputs.setdefault((operand, dims), INPUTS[len(inputs) : len(inputs) + 1])
                named.append(inputs[operand, dims])
            operations: Any = _operation(member)
            for operation in operations:
                last = f"%{len(formula) - 1}"
                operands = [last if item is None else named[item] for item in operation[1:]]
                formula.append(" ".join((operation[0], *operands, _NAMES[tensor_of(member).dtype])))
            steps[member] = f"%{len(formula) - 1}"
        fits = len(formula) <= MAX_STEPS and len(numbers) <= MAX_NUMBERS and len(inputs) <= len(INPUTS)
        wide = {dim for dim, size in enumerate(tensor_of(self.root).shape) if size != 1}
        fits &= wide <= {dim for _, dims in inputs for dim in dims}  # a member may be expanded
        return (formula, inputs) if fits else None

    def call(self) -> fx.Node:
        """The call of `_pointwise` that computes all members of the group."""
        formula = self._formula()
        assert formula is not None  # it was when its last member came
        steps, inputs = formula
        like = tensor_of(self.root)
        values = {name: self._aligned(*key) for key, name in inputs.items()}
        first = values.pop(INPUTS[0])
        if all(tensor_of(value).dim() < like.dim() for value in (first, *values.values())):
            shape = [*[1] * (like.dim() - tensor_of(first).dim()), *tensor_of(first).shape]
            first = put(self.root, aten.view.default, tensor_of(first).view(shape), first, shape)
        return put(
            self.root,
            ours._pointwise.default,
            like,
            first,
            "; ".join(steps),
            dtype_name(like.dtype),
            **values,
        )

    def _aligned(self, value: fx.Node, dims: Dims) -> fx.Node:
        """An input whose dimensions are the last of the result's."""
        rank = tensor_of(self.root).dim()
        if all(dim in (None, rank - len(dims) + number) for number, dim in enumerate(dims)):
            return value
        sizes = dict(zip(dims, tensor_of(value).shape, strict=True))
        shape = [sizes.get(dim, 1) for dim in range(rank)]
        return put(self.root, aten.view.default, tensor_of(value).view(shape), value, shape)


def _operands(call: fx.Node) -> list[Any]:
    """Operands of an operation, in its order."""
    if is_call(call, aten.clamp):
        passed = list(arguments(call).values())
        return [item for item in passed if item is not None]
    return list(arguments(call).values())[: 2 if is_call(call, *_BINARY) else 1]


def _operation(call: fx.Node) -> tuple[Step, ...] | None:
    """Steps of a pointwise call; None for other calls."""
    packet: Any = getattr(call.target, "overloadpacket", None)
    if not call.users or (packet not in _STEPS and packet is not aten.clamp):
        return None
    passed = arguments(call)
    if any(passed.get(name, value) not in (None, value) for name, value in _FIXED.items()):
        return None
    operands = _operands(call)
    if not is_node(operands[0]) or not all(_can_read(operand, call) for operand in operands):
        return None
    return _STEPS[packet] if packet in _STEPS else _clamped(passed)


def _clamped(passed: dict[str, Any]) -> tuple[Step, ...]:
    """The steps of a clamp: one for each limit, the second of what the first has made."""
    sides = [step for step, limit in (("max", "min"), ("min", "max")) if passed[limit] is not None]
    return tuple((name, 0 if number == 0 else None, number + 1) for number, name in enumerate(sides))


def _can_read(value: Any, call: fx.Node) -> bool:
    """True if an element-wise kernel with the result of a call can read a value."""
    result = tensor_of(call)
    if not is_node(value):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) <= torch.finfo(torch.float32).max
    read = tensor_of(value)
    fits = result.dtype in _NAMES and read.dtype in _READ and read.device == result.device
    is_cast = is_call(call, aten._to_copy, aten.clone)
    fits &= is_cast or torch.promote_types(read.dtype, result.dtype) == result.dtype
    return (
        fits
        and all(type(size) is int for size in (*read.shape, *result.shape))
        and read.dim() <= result.dim()
    )


def _is_shaped(value: fx.Node) -> bool:
    """True if a value is another one in another shape, or repeated."""
    return is_reshaped(value) or is_call(value, aten.expand)


def _users(node: fx.Node) -> list[fx.Node]:
    """Nodes that read a value, through views."""
    users = []
    for user in node.users:
        users += _users(user) if _is_shaped(user) else [user]
    return users


def _before_views(value: fx.Node, dims: Dims) -> tuple[fx.Node, Dims]:
    """A value before views that only add and take away dimensions of one element."""
    while _is_shaped(value):
        source: Any = value.args[0]
        shape = tensor_of(source).shape
        if not all(type(size) is int for size in (*shape, *tensor_of(value).shape)):
            break
        if is_call(value, aten.expand):
            behind = dims[len(dims) - len(shape) :]
            dims = tuple(None if size == 1 else dim for size, dim in zip(shape, behind, strict=True))
        else:
            wide = [dim for dim, size in zip(dims, tensor_of(value).shape, strict=True) if size != 1]
            if [size for size in shape if size != 1] != [s for s in tensor_of(value).shape if s != 1]:
                break
            left = iter(wide)
            dims = tuple(None if size == 1 else next(left) for size in shape)
        value = source
    return value, dims
