"""A recorded graph as a list of calls of operators, which C++ runs."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from ..graphs.nodes import arguments, as_list, is_call, tensor_of
from ..graphs.tracing import ITEM, PARTS, TENSOR, VALUE, Number, as_recorded, is_operator
from .plan import Plan

_ATEN = torch.ops.aten
_END = 2**63 - 1  # of a dimension
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


class Integers:
    """The numbers that differ from call to call, as expressions of the symbols; each is computed once."""

    def __init__(self, env: ShapeEnv, symbols: list[Any]) -> None:
        self._env, self._symbols = env, symbols
        self._places: dict[Any, int] = {}

    def place_of(self, number: Any) -> int:
        """The place of a number among the integers."""
        number = as_recorded(number)
        expression = number.expression if isinstance(number, Number) else sympy.Integer(number)
        return self._places.setdefault(self._env.simplify(expression), len(self._places))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_pinned(self) -> bool:
        """Whether the recording holds for one value of a symbol alone."""
        return any(self._env.simplify(symbol).is_number for symbol in self._symbols)

    def function(self, least: list[int]) -> Callable[..., list[int] | None]:
        """A function of the symbols that returns the integers, or None where the recording does not hold."""
        printed = PythonPrinter().doprint
        conditions = [f"{symbol} >= {low}" for symbol, low in zip(self._symbols, least, strict=True)]
        conditions += [f"({printed(guard.expr)})" for guard in self._env.guards]
        text = (
            f"lambda {', '.join(map(str, self._symbols))}: "
            f"[{', '.join(map(printed, self._places))}] if {' and '.join(conditions) or True} else None"
        )
        made: Callable[..., list[int] | None] = eval(text, {"math": __import__("math")})
        return made


def assemble(graph: fx.Graph, integers: Integers, plan: Plan, weights: list[Tensor]) -> Any:
    """A program of the calls of a graph.

    Args:
        graph: its placeholders are the inputs of the plan, its output is a list.
        weights: of the model. A matrix that several layers share is only right as long as theirs lie in it.
    """
    program = torch.classes.moe_mps.Program()
    for example, dims in plan.inputs:
        program.add_input(example, list(dims), list(dims.values()))
    for view in plan.views:
        program.add_view(*view)
    _Assembly(program, graph, integers)
    constants = [node.meta for node in graph.nodes if node.op == "get_attr"]
    read = {id(meta[TENSOR]) for meta in constants}
    joined = [part for meta in constants for part in meta.get(PARTS, ())]
    for tensor in [*joined, *(each for each in weights if id(each) not in read)]:
        program.add_weight(tensor)  # what is read by itself is found wherever it lies
    return program


class _Assembly:
    def __init__(self, program: Any, graph: fx.Graph, integers: Integers) -> None:
        self._program, self._integers = program, integers
        self._places: dict[fx.Node, int] = {}
        self._constants: dict[Any, int] = {}
        self._aliases: dict[fx.Node, tuple[fx.Node, list[_Step]]] = {}
        calls: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                self._places[node] = len(self._places)
            elif node.op == "get_attr":
                self._constants[node] = program.add_constant(node.meta[TENSOR])
            elif node.op == "call_function":
                if (shown := _view(node)) is not None:
                    base, steps = self._aliases.get(shown[0], (shown[0], []))
                    self._aliases[node] = base, [*steps, shown[1]]
                if is_operator(node) or node in self._aliases:
                    calls.append(node)
        self._inputs = len(self._places)
        for node in calls:  # so that all integers are known
            fx.node.map_aggregate((node.args, node.kwargs), self._note_integer)
        self._next = self._inputs + len(integers)
        returned: Any = graph.output_node().args[0]
        results = list(returned)
        calls = [node for node in calls if not self._is_passed_over(node)]
        last = self._last_uses(calls, results)
        for node in calls:
            ends = [self._places[each] for each in last[node]]
            if node in self._aliases:
                self._alias(node, ends)
            else:
                self._call(node, ends)
        program.finish(self._next, [self._place(node) for node in results])

    def _note_integer(self, value: Any) -> None:
        if isinstance(value, Number):
            self._integers.place_of(value)

    def _is_passed_over(self, node: fx.Node) -> bool:
        """Whether a view is only a step on the way to others."""
        is_view = node in self._aliases or is_call(node, *_SPLITTING)
        return is_view and all(user in self._aliases for user in node.users)

    def _alias(self, node: fx.Node, last: list[int]) -> None:
        base, steps = self._aliases[node]
        numbers = [[self._place(number) for number in step.numbers] for step in steps]
        self._places[node], self._next = self._next, self._next + 1
        names = [step.name for step in steps]
        self._program.add_alias(self._place(base), names, numbers, self._places[node], last)

    def _call(self, node: fx.Node, last: list[int]) -> None:
        target: Any = node.target
        schema = target._schema
        given = (
            dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        )
        arguments, lists = [], []
        for number, argument in enumerate(schema.arguments):
            value = given.get(argument.name, argument.default_value)
            if isinstance(value, (list, tuple)) and (not value or any(map(_is_changing, value))):
                lists.append(number)
                arguments.append([self._place(each) for each in value])
            else:
                arguments.append([self._place(value, str(argument.real_type))])
        items = {user.args[1]: user for user in node.users if user.target is ITEM}
        of_many = isinstance(node.meta[VALUE], (list, tuple))
        made = [items.get(k) for k in range(len(node.meta[VALUE]))] if of_many else [node]
        read = [each if each is not None and each.users else None for each in made]
        results = []
        for each in read:
            results.append(-1 if each is None else self._next)
            if each is not None:
                self._places[each], self._next = self._next, self._next + 1
        self._program.add_call(schema.name, schema.overload_name, arguments, lists, results, last)

    def _last_uses(self, calls: list[fx.Node], results: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """{call: what it is the last to read}."""
        seen: set[fx.Node] = set(results)
        last: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(calls):
            read = [self._aliases[node][0]] if node in self._aliases else node.all_input_nodes
            last[node] = [used for used in read if used not in seen and used.op != "get_attr"]
            seen.update(read)
        return last

    def _place(self, value: Any, kind: str = "") -> int:
        if isinstance(value, fx.Node):
            return self._constants[value] if value in self._constants else self._places[value]
        if isinstance(value, Number):
            return self._inputs + self._integers.place_of(value)
        if "float" in kind and "int" not in kind:
            value = [float(v) for v in value] if isinstance(value, (list, tuple)) else value
            value = float(value) if isinstance(value, int) else value
        if isinstance(value, torch.memory_format):
            value = _FORMATS.index(value)
        value = list(value) if isinstance(value, tuple) else value
        key = repr(value)
        if key not in self._constants:
            self._constants[key] = self._program.add_constant(value)
        return self._constants[key]


def _is_changing(value: Any) -> bool:
    return value is None or isinstance(value, (fx.Node, Number))


class _Step(NamedTuple):
    """A view, by its name in csrc/program.mm and its numbers."""

    name: str
    numbers: list[Any]


_OF_NUMBERS = {
    _ATEN.view.default: "view",
    _ATEN._unsafe_view.default: "view",
    _ATEN.permute.default: "permute",
    _ATEN.select.int: "select",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.squeeze.dims: "squeeze",
    _ATEN.unsqueeze.default: "unsqueeze",
}
_SPLITTING = (_ATEN.split, _ATEN.split_with_sizes, _ATEN.unbind)


def _view(node: fx.Node) -> tuple[fx.Node, _Step] | None:
    """What a node is a view of, and how; None if it is no view or of a kind that is left to torch."""
    call: Any = node.args[0] if node.target is ITEM else node
    source, *given = arguments(call).values()
    if call.target in _OF_NUMBERS:
        return source, _Step(_OF_NUMBERS[call.target], [*chain.from_iterable(map(as_list, given))])
    if call.target is _ATEN.expand.default:
        return source, _Step("expand", given[0])
    if call.target is _ATEN.transpose.int:
        dims = [*range(tensor_of(source).dim())]
        dims[given[0]], dims[given[1]] = dims[given[1]], dims[given[0]]
        return source, _Step("permute", dims)
    if call.target is _ATEN.slice.Tensor:
        dim, start, end, step = given
        return source, _Step("slice", [dim, start or 0, _END if end is None else end, step])
    if node is call or not is_call(call, *_SPLITTING):
        return None
    number: Any = node.args[1]
    if is_call(call, _ATEN.unbind):
        return source, _Step("select", [given[0], number])
    sizes, dim = given
    if isinstance(sizes, int):
        sizes = [sizes] * (number + 1)
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:number])
    return source, _Step("slice", [dim, start, start + sizes[number], 1])
