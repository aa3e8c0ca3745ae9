"""Statements that only reorder the outputs of linear layers (Qwen3-Next): one copy instead of many.

The order is found by running the statements on tensors whose values are their own indices.
"""

import ast
import copy
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..program.building import helper, own_module
from ..program.programs import compile_forward
from ..program.reads import record
from ..record import RECORD, record_of
from ..runtime import called
from .linear import NamedCall, is_named, join, layers_of_one_input, together

_OWN = "_moe_mps_own_order"


class Order:
    """Results that hold the layers' outputs for the same token in another order.

    Attributes:
        index: [N], int32: for each value of the concatenated results, its column in the outputs.
        sizes, shapes: the number of values that each result has for a token, and their shape.
    """

    def __init__(self, index: Tensor, shapes: list[tuple[int, ...]]):
        self.index = index
        self.shapes = shapes
        self.sizes = [torch.Size(shape).numel() for shape in shapes]

    def results(self, outputs: Tensor) -> list[Tensor]:
        """The results, views of one tensor, of outputs [batch, tokens, columns]."""
        if self.index.device != outputs.device:
            self.index = self.index.to(outputs.device)
        parts = outputs.index_select(-1, self.index).split_with_sizes(self.sizes, -1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


@called
def in_order(module: nn.Module, layers: tuple[nn.Module, ...], x: Tensor, own: Callable) -> Sequence[Tensor]:
    """own(*(layer(x) for each layer)). `own`, the model's statements, runs only if the dtypes differ."""
    outputs = together(layers, x) if x.dim() == 3 else None
    if outputs is None:
        each = [layer(x) for layer in layers]
        if x.dim() != 3 or any(output.dtype is not each[0].dtype for output in each):
            return own(*each)
        outputs = torch.cat(each, -1)
    return module.__dict__[RECORD].formula.results(outputs)


# Rewriting of a forward


class _Region(NamedTuple):
    """The statements after the layers, and the names that they assign and later statements read."""

    statements: list[ast.stmt]
    names: list[str]


def order_in_body(module: nn.Module, body: list[ast.stmt], function: types.FunctionType) -> list[str]:
    """Rewrites the statements after linear layers with one input if they only reorder the outputs.

    Returns: what the forward runs now.
    """
    group = layers_of_one_input(module, body)
    if not group or group[-1].place - group[0].place >= len(group):  # other statements are in between
        return []
    for region in _regions(body, group):
        own = _function(group, region)
        order = _order(module, group, compile_forward(function, own))
        if order is not None:
            record_of(module).formula = order
            _replace(body, group, region, own)
            joined = join(*(call.layer for call in group))
            names = ", ".join(call.name for call in group)
            return ["index_select", *([f"linear_quantized ({names})"] if joined else [])]
    return []


def _regions(body: list[ast.stmt], group: list[NamedCall]) -> Iterator[_Region]:
    """Runs of assignments after the layers, longest first; nothing after a run reads the layers' outputs."""
    start = group[-1].place + 1
    end = start
    while end < len(body) and isinstance(body[end], ast.Assign):
        end += 1
    for stop in range(end, start, -1):
        statements, rest = body[start:stop], body[stop:]
        stored = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and _stores(n)}
        if not any(is_named(call.output, rest) for call in group):
            yield _Region(statements, sorted(name for name in stored if _is_read(name, rest)))


def _stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_read(name: str, statements: list[ast.stmt]) -> bool:
    """Whether the value that a name has in front of the statements may be read by them."""
    for statement in statements:
        named = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
        if any(not _stores(n) for n in named):
            return True
        if named and isinstance(statement, ast.Assign):
            return False
    return False


def _function(group: list[NamedCall], region: _Region) -> ast.FunctionDef:
    """The statements as a function of `self` and the layers' outputs."""
    arguments = [ast.arg("self"), *(ast.arg(call.output) for call in group)]
    result = ast.Return(ast.Tuple([ast.Name(name, ast.Load()) for name in region.names], ast.Load()))
    every: Any = {"posonlyargs": [], "kwonlyargs": [], "kw_defaults": [], "defaults": []}
    options: dict[str, Any] = {"type_params": []}
    body = [*copy.deepcopy(region.statements), result]
    return ast.FunctionDef("forward", ast.arguments(args=arguments, **every), body, [], **options)


def _order(module: nn.Module, group: list[NamedCall], own: Callable) -> Order | None:
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
    return Order(index.int(), [shape for shape, _ in one])


def _places(
    own: Callable, module: nn.Module, columns: list[int], batch: int, tokens: int
) -> list[tuple[tuple[int, ...], Tensor]] | None:
    """For each result the shape of a token's values, and the columns that they come from."""
    width = sum(columns)
    outputs = torch.arange(batch * tokens * width, dtype=torch.float64).view(batch, tokens, width)
    try:
        with torch.no_grad():
            results = own(module, *outputs.split(columns, -1))
    except Exception:  # of statements that need more than the layers' outputs
        return None
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


def _replace(body: list[ast.stmt], group: list[NamedCall], region: _Region, own: ast.FunctionDef) -> None:
    own.name = _OWN
    own.args.args = own.args.args[1:]  # self is that of the forward around it
    layers = ast.Tuple([own_module(call.name) for call in group], ast.Load())
    itself, x, function = (ast.Name(name, ast.Load()) for name in ("self", group[0].input, _OWN))
    targets = ast.Tuple([ast.Name(name, ast.Store()) for name in region.names], ast.Store())
    start = group[0].place
    gone = {id(body[call.place]) for call in group} | {id(statement) for statement in region.statements}
    kept = [statement for statement in body[start:] if id(statement) not in gone]
    body[start:] = [own, ast.Assign([targets], helper("in_order", itself, layers, x, function)), *kept]
