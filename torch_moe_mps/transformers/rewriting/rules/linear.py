"""Quantised linear layers with the same input (q, k and v; gate and up) run as one operator.

Their rows are concatenated in memory.
"""

import ast
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ...linears import QuantizedLinear
from ..program.building import calls, helper, item, own_module, replace_in, unary_call
from ..program.programs import Program, name_of
from ..record import NOTHING, RECORD, record_of
from ..runtime import called

ops = torch.ops.moe_mps

_WITH_MEMORY = (Tensor, nn.Parameter)
_TENSORS = ("packed", "scales", "biases", "bias")


def _nothing() -> None:
    return None


class Joined:
    """The concatenated weights of several layers, whose own parameters are views of them.

    A copy or a pickle of a layer has its own weights and leaves this out; its layers are joined again.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]):
        self.format = layers[0].format
        self.rows = [layer.rows for layer in layers]
        self.packed, self.scales, self.biases = (
            self._join([getattr(layer, name) for layer in layers]) for name in _TENSORS[:3]
        )
        has_bias = any(layer.bias is not None for layer in layers)
        self.bias = self._join([_bias(layer) for layer in layers]) if has_bias else None
        self.places = self._share(layers)

    @staticmethod
    def _join(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    def _share(self, layers: Sequence[QuantizedLinear]) -> list[tuple]:
        for name in _TENSORS:
            whole = getattr(self, name)
            parts = [None] * len(layers) if whole is None else whole.split(self.rows)
            for layer, part in zip(layers, parts, strict=True):
                parameter = layer._parameters[name]
                if parameter is not None:
                    parameter.data = part
        return list(map(_place, layers))

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        return list(map(_place, layers)) == self.places

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _nothing, ()


def _bias(layer: QuantizedLinear) -> Tensor:
    if layer.bias is not None:
        return layer.bias
    return torch.zeros(layer.rows, dtype=layer.weight.dtype, device=layer.packed.device)


def _place(layer: nn.Module) -> tuple:
    """The addresses of a layer's weights, and the parameters that hold them: they change with the weights.

    Empty for weights without memory of their own: torch.export and FSDP2 put subclasses of Tensor there.
    """
    own = layer._parameters
    packed, scales = own.get("packed"), own.get("scales")
    if packed is None or scales is None or packed.__class__ not in _WITH_MEMORY:
        return ()
    return packed.data_ptr(), scales.data_ptr(), scales.dtype, id(own["biases"]), id(own["bias"])


def _can_join(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[QuantizedLinear]]:
    """Whether the layers can be one matrix: same format, dtype and device, and no hook on any of them."""
    first = layers[0]
    for layer in layers:
        if type(layer) is not QuantizedLinear or is_observed(layer) or layer.format != first.format:
            return False
        same = all(
            getattr(layer, name).dtype == getattr(first, name).dtype
            and getattr(layer, name).device == getattr(first, name).device
            for name in ("packed", "scales")
        )
        known = type(layer.packed) in _WITH_MEMORY and not layer.packed.is_meta
        if not same or layer.columns != first.columns or not known:
            return False
    biases = [bias.dtype for layer in layers if (bias := layer._parameters["bias"]) is not None]
    return len(set(biases)) < 2 and len({id(layer) for layer in layers}) == len(layers)


@torch.compiler.assume_constant_result
def join(*layers: nn.Module) -> bool:
    """Whether the layers' weights are one matrix, which the record of the first holds; joins them if not."""
    for layer in layers:
        if is_observed(layer):
            return False
    found: Joined | None = layers[0].__dict__.get(RECORD, NOTHING).joined
    if found is not None and found.is_current(layers):
        return True
    if not _can_join(layers):
        return False
    record_of(layers[0]).joined = Joined(layers)
    return True


def together(layers: tuple[nn.Module, ...], x: Tensor) -> Tensor | None:
    """The concatenated outputs of the layers; None if they cannot be one matrix."""
    if not join(*layers):
        return None
    whole = layers[0].__dict__[RECORD].joined
    form = whole.format
    return ops.linear_quantized(
        x, whole.packed, whole.scales, whole.biases, whole.bias, form.bits, form.group_size, form.mode
    )


@called
def linears(layers: tuple[nn.Module, ...], x: Tensor) -> Sequence[Tensor]:
    """layer(x) of each layer."""
    out = together(layers, x)
    if out is None:
        return [layer(x) for layer in layers]
    return out.split_with_sizes(layers[0].__dict__[RECORD].joined.rows, -1)


class NamedCall(NamedTuple):
    """A statement output = self.name(input) of a linear layer, at a place of a body."""

    place: int
    output: str
    input: str
    name: str
    layer: nn.Linear | QuantizedLinear


def layers_of_one_input(
    module: nn.Module, body: list[ast.stmt], kinds: tuple[type, ...] = (nn.Linear, QuantizedLinear)
) -> list[NamedCall]:
    """The calls of linear layers with the same input as the first, if there are several.

    All may run where the first does: nothing in between reads their outputs or assigns their input.
    """
    found = [call for i, statement in enumerate(body) if (call := _named_call(module, i, statement, kinds))]
    group = [call for call in found if call.input == found[0].input]
    if len(group) < 2:
        return []
    first, x, places = group[0].place, group[0].input, {call.place for call in group}
    others = [statement for i, statement in enumerate(body[: max(places)]) if i > first and i not in places]
    in_the_way = is_named(x, others) or any(is_named(c.output, body[first : c.place]) for c in group[1:])
    return [] if in_the_way else group


def join_in_body(module: nn.Module, body: list[ast.stmt]) -> list[str]:
    """`join_linears` for the statements of a forward that is no program. Returns: the layers' names."""
    group = layers_of_one_input(module, body, (QuantizedLinear,))
    if not group or not join(*(call.layer for call in group)):
        return []
    layers = ast.Tuple([own_module(call.name) for call in group], ast.Load())
    targets = ast.Tuple([ast.Name(call.output, ast.Store()) for call in group], ast.Store())
    first, places = group[0].place, {call.place for call in group}
    statement_of_all = ast.Assign([targets], helper("linears", layers, ast.Name(group[0].input, ast.Load())))
    body[:] = [
        statement_of_all if i == first else statement
        for i, statement in enumerate(body)
        if i == first or i not in places
    ]
    return [call.name for call in group]


def _named_call(
    module: nn.Module, place: int, statement: ast.stmt, kinds: tuple[type, ...]
) -> NamedCall | None:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or not isinstance(call, ast.Call) or call.keywords:
        return None
    owner, _, name = ast.unparse(call.func).rpartition(".")
    layer = module._modules.get(name) if owner == "self" else None
    x = call.args[0] if len(call.args) == 1 else None
    if not isinstance(x, ast.Name) or not isinstance(layer, kinds):
        return None
    assert isinstance(layer, (nn.Linear, QuantizedLinear))
    return NamedCall(place, target.id, x.id, name, layer)


def is_named(name: str, statements: list[ast.stmt]) -> bool:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)


def join_linears(program: Program) -> None:
    """Rewrites the calls of quantised linear layers that have one input."""
    inputs = defaultdict(list)
    for statement, call in calls(program):
        found = unary_call(program, call)
        if found is None or not isinstance(found[1], QuantizedLinear):
            continue
        name, layer, x = found
        if isinstance(x, ast.Name):
            inputs[program.last_name(x) or x.id].append((statement, call, name, layer))
    for group in inputs.values():
        layers = [layer for *_, layer in group]
        if len(group) > 1 and _can_join(layers) and not program.mutates_between(group[0][0], group[-1][0]):
            _join(program, group)


def _join(program: Program, group: list[tuple[ast.Assign, ast.Call, str, nn.Module]]) -> None:
    names = [name for _, _, name, _ in group]
    join(*(layer for *_, layer in group))
    layers = ast.Tuple([own_module(name) for name in names], ast.Load())
    first, call, *_ = group[0]
    together = program.assign("joined", helper("linears", layers, call.args[0]))
    program.statements.insert(program.statements.index(first), together)
    for index, (statement, call, *_) in enumerate(group):
        replace_in(program, statement, call, item(name_of(together), index))
    program.rewrites.append(f"linear_quantized ({', '.join(names)})")
