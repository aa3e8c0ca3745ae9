"""A recorded graph as a list of calls of operators, which C++ runs."""

from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions

from ..graphs.nodes import memory_of, written
from ..graphs.tracing import (
    ITEM,
    PARTS,
    TENSOR,
    VALUE,
    NotCapturable,
    Number,
    as_recorded,
    is_operator,
)
from .stand_ins import StandIns

_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
# {function of sympy: the operation of csrc/program.mm}, as Python computes with integers
_OPERATIONS = {
    sympy.Add: "+",
    sympy.Mul: "*",
    functions.PowByNatural: "**",
    functions.FloorDiv: "//",
    functions.CleanDiv: "//",
    sympy.Mod: "%",
    functions.Mod: "%",
    functions.PythonMod: "%",
    functions.Max: "max",
    functions.Min: "min",
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
    sympy.And: "and",
    sympy.Or: "or",
}


class CallIntegers:
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
        """True if the recording holds for one value of a symbol alone."""
        return any(map(self.is_fixed, range(len(self._symbols))))

    def is_fixed(self, symbol: int) -> bool:
        """True if the recording holds for one value of the symbol of this number alone."""
        return bool(self._env.simplify(self._symbols[symbol]).is_number)

    def add_to(self, program: Any) -> None:
        """Adds the integers, and the conditions under which the recording holds, to a program."""
        for guard in self._env.guards:
            program.add_guard(postfix(guard.expr, self._symbols))
        for expression in self._places:
            program.add_integer(postfix(expression, self._symbols))


def postfix(expression: Any, symbols: list[Any]) -> str:
    """An expression of integers as `Expression` of csrc/program.mm reads it.

    Raises: NotCapturable for a function that C++ does not compute.
    """
    if expression.is_Integer or expression in (sympy.true, sympy.false):
        return str(int(bool(expression)) if expression.is_Boolean else int(expression))
    if expression in symbols:
        return f"s{symbols.index(expression)}"
    arguments = [postfix(argument, symbols) for argument in expression.args]
    if isinstance(expression, sympy.Not):
        return f"{arguments[0]} 0 =="
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        return " ".join([arguments[0]] + [f"{arguments[0]} *"] * (int(expression.exp) - 1))
    operation = next((word for kind, word in _OPERATIONS.items() if isinstance(expression, kind)), None)
    if operation is None:
        raise NotCapturable(f"it computes a size by {type(expression).__name__}")
    return " ".join([arguments[0], *(f"{argument} {operation}" for argument in arguments[1:])])


def assemble(
    graph: fx.Graph, integers: CallIntegers, stand_ins: StandIns, least: list[int], weights: list[Tensor]
) -> Any:
    """A program of the calls of a graph.

    Args:
        graph: its placeholders are the inputs of the recording, its output is a list.
        least: what each symbol is at least.
        weights: of the model. A matrix that several layers share is only right as long as theirs lie in it.
    """
    program = torch.classes.moe_mps.Program()
    for number in least:
        program.add_symbol(number)
    for example, dims in stand_ins.inputs:
        program.add_input(example, list(dims), list(dims.values()))
    for example in stand_ins.arriving:
        program.add_arriving(example)
    for view in stand_ins.views:
        program.add_view(*view)
    for number in stand_ins.numbers:
        program.add_number(number)
    for number in stand_ins.buffers:
        program.add_buffer(number)
    _Assembly(program, graph, integers, stand_ins.of_buffers)
    integers.add_to(program)
    constants = [node.meta for node in graph.nodes if node.op == "get_attr"]
    read = {id(meta[TENSOR]) for meta in constants}
    joined = [part for meta in constants for part in meta.get(PARTS, ())]
    for tensor in [*joined, *(weight for weight in weights if id(weight) not in read)]:
        program.add_weight(tensor)  # a tensor that is read by itself is found wherever it lies
    return program


class _Assembly:
    def __init__(self, program: Any, graph: fx.Graph, integers: CallIntegers, of_buffers: set[int]) -> None:
        self._program, self._integers = program, integers
        self._of_buffers = of_buffers
        self._places: dict[fx.Node, int] = {}
        self._constants: dict[Any, int] = {}
        calls: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                self._places[node] = len(self._places)
            elif node.op == "get_attr":
                self._constants[node] = program.add_constant(node.meta[TENSOR])
            elif is_operator(node):
                calls.append(node)
        self._inputs = len(self._places)
        for node in calls:  # so that all integers are known
            fx.node.map_aggregate((node.args, node.kwargs), self._note_integer)
        self._next = self._inputs + len(integers)
        returned: Any = graph.output_node().args[0]
        results = list(returned)
        last = self._last_uses(calls, results)
        for node in calls:
            self._call(node, [self._places[item] for item in last[node]])
        program.finish(self._next, [self._place(node) for node in results])

    def _note_integer(self, value: Any) -> None:
        if isinstance(value, Number):
            self._integers.place_of(value)

    def _call(self, node: fx.Node, last: list[int]) -> None:
        """Adds an operator to the program, with the places of its arguments and of results that are read."""
        target: Any = node.target
        schema = target._schema
        arguments, lists = self._arguments(schema, node)
        items = {user.args[1]: user for user in node.users if user.target is ITEM}
        of_many = isinstance(node.meta[VALUE], (list, tuple))
        every = [items.get(k) for k in range(len(node.meta[VALUE]))] if of_many else [node]
        read = [one if one is not None and one.users else None for one in every]
        results = []
        for item in read:
            results.append(-1 if item is None else self._next)
            if item is not None:
                self._places[item], self._next = self._next, self._next + 1
        self._program.add_call(schema.name, schema.overload_name, arguments, lists, results, last)
        if any(map(self._is_held, map(memory_of, written(node)))):
            self._program.mark_written()

    def _is_held(self, memory: fx.Node) -> bool:
        """True for memory that the model's call holds. Of its buffers only spare capacity is written."""
        is_input = memory.op == "placeholder" and self._places[memory] not in self._of_buffers
        return is_input or memory.op == "get_attr"

    def _arguments(self, schema: Any, node: fx.Node) -> tuple[list[list[int]], list[int]]:
        """(places of each argument's values, the numbers of the arguments that are lists)"""
        names = (argument.name for argument in schema.arguments)
        passed = dict(zip(names, node.args, strict=False)) | node.kwargs
        arguments, lists = [], []
        for number, argument in enumerate(schema.arguments):
            value = passed.get(argument.name, argument.default_value)
            if isinstance(value, (list, tuple)) and (not value or any(map(_is_changing, value))):
                lists.append(number)
                arguments.append([self._place(one) for one in value])
            else:
                arguments.append([self._place(value, str(argument.real_type))])
        return arguments, lists

    def _last_uses(self, calls: list[fx.Node], results: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """{call: values that it is the last to read}."""
        seen: set[fx.Node] = set(results)
        last: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(calls):
            read = node.all_input_nodes
            last[node] = [used for used in read if used not in seen and used.op != "get_attr"]
            seen.update(read)
        return last

    def _place(self, value: Any, kind: str = "") -> int:
        """The place of an argument's value: of a result, of a number that varies, or of a constant."""
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
