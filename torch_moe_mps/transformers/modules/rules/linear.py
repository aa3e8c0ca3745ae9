"""Quantised linear layers with the same input (q, k and v; gate and up) run as one operator.

Their rows are concatenated in memory.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...basics.report import Done
from ...basics.state import NOTHING, STATE, state_of
from ..experts import is_observed
from ..linears import QuantizedLinear

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
        self._share(layers)
        self.parameters = _parameters(layers)
        self.weights = [getattr(layer, name) for layer in layers for name in ("packed", "scales")]
        self.addresses = [*map(Tensor.data_ptr, self.weights)]

    @staticmethod
    def _join(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    def _share(self, layers: Sequence[QuantizedLinear]) -> None:
        for name in _TENSORS:
            whole = getattr(self, name)
            parts = [None] * len(layers) if whole is None else whole.split(self.rows)
            for layer, part in zip(layers, parts, strict=True):
                parameter = layer._parameters[name]
                if parameter is not None:
                    parameter.data = part

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers' parameters still are views of these weights, which `to` moves away."""
        same = all(map(operator.is_, _parameters(layers), self.parameters))
        return same and [*map(Tensor.data_ptr, self.weights)] == self.addresses

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _nothing, ()


def _bias(layer: QuantizedLinear) -> Tensor:
    if layer.bias is not None:
        return layer.bias
    return torch.zeros(layer.rows, dtype=layer.weight.dtype, device=layer.packed.device)


def _parameters(layers: Sequence[nn.Module]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for layer in layers:
        own = layer._parameters
        found += own.get("packed"), own.get("scales"), own.get("biases"), own.get("bias")
    return found


def can_join(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[QuantizedLinear]]:
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
    """Whether the layers' weights are one matrix, which the state of the first has; joins them if not."""
    if is_observed(*layers):
        return False
    found: Joined | None = layers[0].__dict__.get(STATE, NOTHING).joined
    if found is not None and found.is_current(layers):
        return True
    if not can_join(layers):
        return False
    state_of(layers[0]).joined = Joined(layers)
    return True


def together(layers: tuple[nn.Module, ...], x: Tensor) -> Tensor | None:
    """The concatenated outputs of the layers; None if they are no matrix."""
    if not join(*layers):
        return None
    whole = layers[0].__dict__[STATE].joined
    weights = whole.packed, whole.scales, whole.biases, whole.bias
    return ops.linear_quantized(x, *weights, whole.format.name)


def linears(layers: tuple[nn.Module, ...], x: Tensor) -> Sequence[Tensor]:
    """layer(x) of each layer."""
    out = together(layers, x)
    if out is None:
        return [layer(x) for layer in layers]
    return out.split_with_sizes(layers[0].__dict__[STATE].joined.rows, -1)


def together_done(names: Iterable[str]) -> Done:
    return Done("linear_quantized", f"linear_quantized ({', '.join(names)})")
