"""Quantised linear layers with the same input as one matrix: the gate and up projections of an MLP."""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...basics.guards import is_observed
from ...basics.state import EMPTY_STATE, STATE, state_of
from ...basics.tensors import WEIGHTS, joined_rows
from ...graphs.patterns import Bound
from ..linears import QuantizedLinear
from ..traced import path_of


def layer_of(bound: Bound, part: str) -> str | None:
    """The name of the module's own layer whose weight and bias a formula has bound as PART and PART_BIAS."""
    weight, bias = path_of(bound[part]), bound[f"{part}_BIAS"]
    name = (weight or "").removesuffix(".weight")
    is_one = weight == f"{name}.weight" and (bias is None or path_of(bias) == f"{name}.bias")
    return name if is_one and "." not in name else None


class JoinedWeights:
    """The concatenated weights of several layers, whose own parameters are views of them.

    A copy or a pickle of a layer has its own weights and leaves this out; its layers are joined again.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]):
        self.format = layers[0].format
        rows = [layer.rows for layer in layers]
        self.weights = [joined_rows(parts, rows) for parts in _parameters(layers)]
        self.parts = [*chain(*_parameters(layers))]
        self.addresses = [part.data_ptr() for part in self.parts if part is not None]

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """True if the layers' parameters still are views of these weights, which `to` moves away."""
        same = all(map(operator.is_, chain(*_parameters(layers)), self.parts))
        return same and [part.data_ptr() for part in self.parts if part is not None] == self.addresses

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(None), ()


def _parameters(layers: Sequence[nn.Module]) -> list[list[Tensor | None]]:
    pairs = [(layer._buffers, layer._parameters) for layer in layers]
    return [
        [buffers[name] if name in buffers else parameters.get(name) for buffers, parameters in pairs]
        for name in WEIGHTS
    ]


def _can_join(layers: Sequence[Any]) -> TypeGuard[Sequence[QuantizedLinear]]:
    """True if the layers can be one matrix: same format, width, dtypes and device."""
    if any(type(layer) is not QuantizedLinear for layer in layers) or len({*layers}) < len(layers):
        return False
    present = [[part for part in parts if part is not None] for parts in _parameters(layers)]
    kinds = [{(part.dtype, part.device) for part in parts} for parts in present]
    has_memory = all(type(part) in (Tensor, nn.Parameter) and not part.is_meta for part in chain(*present))
    widths = {(layer.format, layer.columns) for layer in layers}
    return has_memory and len(widths) == 1 and all(len(kind) < 2 for kind in kinds)


@torch.compiler.assume_constant_result
def join(*layers: nn.Module) -> bool:
    """True if the layers' weights are one matrix, which the state of the first has; joins them if not.

    No matrix of layers that hooks see.
    """
    if is_observed(*layers):
        return False
    result: JoinedWeights | None = layers[0].__dict__.get(STATE, EMPTY_STATE).joined
    if result is not None and result.is_current(layers):
        return True
    if not _can_join(layers):
        return False
    state_of(layers[0]).joined = JoinedWeights(layers)
    return True
