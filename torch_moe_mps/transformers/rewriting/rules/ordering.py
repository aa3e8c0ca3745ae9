"""Statements that only reorder the outputs of linear layers (Qwen3-Next): one copy instead of many.

The order is found by running the statements on tensors whose values are their own indices.
"""

import ast
import copy
import itertools
import types
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...report import Done
from ..program.building import child_of_call, code
from ..program.programs import Block, If, Program, compile_forward, copied, name_of, names_in
from ..reads import record
from ..record import RECORD, record_of
from ..runtime import called
from .linear import LinearCall, join, linear_call, together, together_done
from .trial import tried


class Order:
    """Results that hold the layers' outputs for the same token in another order.

    Attributes:
        index: [N], int32: for each value of the concatenated results, its column in the outputs.
        places: the inverse of `index` if the results have each output once, else None.
        sizes, shapes: the number of values that each result has for a token, and their shape.
    """

    def __init__(self, index: Tensor, columns: int, shapes: list[tuple[int, ...]]):
        each_once = sorted(index.tolist()) == list(range(columns))
        self.index = index.int()
        self.places = index.argsort().int() if each_once else None
        self.shapes = shapes
        self.sizes = [torch.Size(shape).numel() for shape in shapes]

    def on(self, device: torch.device) -> "Order":
        if self.index.device != device:
            self.index = self.index.to(device)
            self.places = None if self.places is None else self.places.to(device)
        return self

    def results(self, values: Tensor) -> list[Tensor]:
        """The results, views of one tensor, of their values [batch, tokens, N]."""
        parts = values.split_with_sizes(self.sizes, -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


@called
def in_order(module: nn.Module, layers: tuple[nn.Module, ...], x: Tensor) -> tuple[bool, Sequence[Tensor]]:
    """(True, the results) of norm(x), or (False, the layers' outputs) where these cannot be one tensor."""
    order: Order = module.__dict__[RECORD].formula.on(x.device)
    outputs = together(layers, x, order.places) if x.dim() == 3 else None
    if outputs is not None and order.places is not None:
        return True, order.results(outputs)
    if outputs is None:
        each = [layer(x) for layer in layers]
        if x.dim() != 3 or any(output.dtype is not each[0].dtype for output in each):
            return False, each
        outputs = torch.cat(each, -1)
    return True, order.results(outputs.index_select(-1, order.index))


# Rewriting of a program


# No Rewrite: what the statements compute counts, not how many there are or what they look like.
def order_outputs(program: Program) -> None:
    """Rewrites the statements after linear layers with one input if they only reorder the outputs."""
    for group in list(_groups(program)):
        for statements, names in _regions(program, group):
            own = _function(group, statements, names)
            order = _order(program.module, group, compile_forward(program.function, own))
            if order is not None:
                record_of(program.module).formula = order
                _replace(program, group, statements, names)
                is_joined = join(*(each.layer for each in group))
                joined = [together_done(each.name for each in group)] if is_joined else []
                in_place = joined and order.places is not None
                program.rewrites += [Done(None, "in order" if in_place else "index_select"), *joined]
                return


def _groups(program: Program) -> Iterator[list[LinearCall]]:
    """Runs of statements that each call a linear layer, all with one input."""
    for block in program.blocks():
        found = [
            linear_call(program, each, each.value) if isinstance(each, ast.Assign) else None for each in block
        ]
        for _, group in itertools.groupby(found, lambda each: each and each.x):
            if len(run := [each for each in group if each is not None]) > 1:
                yield run


def _regions(program: Program, group: list[LinearCall]) -> Iterator[tuple[list[ast.Assign], list[str]]]:
    """Runs of statements after the layers, longest first, and the names of theirs that are read later.

    Nothing after a run reads the layers' outputs.
    """
    block = program.block_of(group[0].statement)
    start = block.index(group[-1].statement) + 1
    statements = list(_may_be_tried(program, block[start:]))
    while statements:
        inside = [name for each in statements for name in names_in(each)]
        outside = [n for n in map(name_of, statements) if program.uses(n) > inside.count(n)]
        if all(program.uses(each.output) == inside.count(each.output) for each in group):
            yield statements, outside
        statements = statements[:-1]


def _may_be_tried(program: Program, block: Block) -> Iterator[ast.Assign]:
    """The assignments in front of another statement, or of a child's call: its hooks would see the trial."""
    for statement in block:
        if not isinstance(statement, ast.Assign) or statement in program.inplace:
            return
        if any(child_of_call(program, n) for n in ast.walk(statement.value) if isinstance(n, ast.Call)):
            return
        yield statement


def _function(group: list[LinearCall], statements: list[ast.Assign], names: list[str]) -> ast.FunctionDef:
    """The statements as a function of `self` and the layers' outputs."""
    arguments = ", ".join(each.output for each in group)
    (function,) = ast.parse(f"def forward(self, {arguments}): return [{', '.join(names)}]").body
    assert isinstance(function, ast.FunctionDef)
    function.body[:0] = copied(statements)
    return function


def _order(module: nn.Module, group: list[LinearCall], own: Callable) -> Order | None:
    """The order that the statements make, if they copy more than once and only reorder within a token."""
    columns = [call.layer.out_features for call in group]
    trial = copy.copy(module)
    many, one = (_places(own, trial, columns, *sizes) for sizes in ((2, 3), (1, 1)))
    if many is None or one is None or [shape for shape, _ in many] != [shape for shape, _ in one]:
        return None
    index = torch.cat([place for _, place in one])
    if not torch.equal(index, torch.cat([place for _, place in many])):
        return None
    _record_numbers(module, own.__code__)
    return Order(index, sum(columns), [shape for shape, _ in one])


def _places(
    own: Callable, module: nn.Module, columns: list[int], batch: int, tokens: int
) -> list[tuple[tuple[int, ...], Tensor]] | None:
    """For each result the shape of a token's values, and the columns that they come from."""
    width = sum(columns)
    outputs = torch.arange(batch * tokens * width, dtype=torch.float64).view(batch, tokens, width)
    results = tried(own, module, *outputs.split(columns, -1)) or ()  # they may need more than the outputs
    if not all(isinstance(r, Tensor) and r.dtype == torch.float64 and r.dim() > 2 for r in results):
        return None
    memory = outputs.untyped_storage().data_ptr()
    copies = [r for r in results if r.untyped_storage().data_ptr() != memory]
    if len(copies) < 2 or any(r.shape[:2] != (batch, tokens) for r in results):
        return None
    starts = outputs[..., :1]
    places = []
    for result in results:
        place = result.reshape(batch, tokens, -1) - starts
        first = place[0, 0].long()
        known = ((first >= 0) & (first < width)).all()
        if not known or not torch.equal(place, first.expand_as(place).double()):
            return None
        places.append((tuple(result.shape[2:]), first))
    return places


def _record_numbers(module: nn.Module, code: types.CodeType) -> None:
    """Notes the numbers of the module that the statements, and methods that they call, may read."""
    codes = [code]
    for each in codes:
        codes += [const for const in each.co_consts if isinstance(const, types.CodeType)]
        for name in each.co_names:
            method = getattr(type(module), name, None)
            if isinstance(method, types.FunctionType) and method.__code__ not in codes:
                codes.append(method.__code__)
            elif isinstance(module.__dict__.get(name), (int, float, str)):
                record(module, name)


def _replace(
    program: Program, group: list[LinearCall], statements: list[ast.Assign], names: list[str]
) -> None:
    """The model's statements become the branch that runs where the outputs are not in one tensor."""
    layers = ", ".join(f"self.{each.name}" for each in group)
    call = code(f"in_order(self, ({layers}), {group[0].x})")
    flag, values = (program.assign(stem, ast.Constant(None)) for stem in ("is_ordered", "values"))
    pair = program.unpack(call, [flag, values])
    results: Block = [
        ast.Assign([ast.Name(name, ast.Store())], code(f"{name_of(values)}[{index}]"))
        for index, name in enumerate(names)
    ]
    block = program.block_of(group[0].statement)
    start = block.index(group[0].statement)
    own = block[start : start + len(group) + len(statements)]
    branching = If(code(name_of(flag)), results, own)
    block[start : start + len(own)] = [pair, flag, values, branching]
    for index, each in enumerate(group):
        program.replace(each.statement, code(f"{name_of(values)}[{index}]"))
    for name in names:  # which both branches assign
        del program.definitions[name]
