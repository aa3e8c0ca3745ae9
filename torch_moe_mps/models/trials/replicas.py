"""Replicas of modules, with a few random numbers, and the caches that they run with."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..basics.code import is_followed
from ..basics.state import STATE, Unsupported, class_before, is_on_top, original_class
from ..caches.held import HeldPools
from ..caches.in_layers import InLayers
from ..upstream.models import LinearAttentionLayer
from .comparing import tried
from .draws import current, is_first_kind, magnitude, normal

_DIRECTIONS = 4  # so that queries and keys differ in more than their length
LEAST_HEADS = 2  # enough to tell an indexer's relu from nothing: one head's keys come in the same order
ATTRIBUTES_OF_MODULES = {*vars(nn.Module()), STATE}


class LinearCache(InLayers):
    """A cache of linear attention of any model, of whose layers a trial uses one.

    Args:
        states: of each kind in a layer.
        layer_idx: of the layer that the trial uses.
    """

    def __init__(self, states: int = 1, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.layers = [LinearAttentionLayer(states) for _ in range(layer_idx + 1)]

    @property
    def layer(self) -> Any:
        return self.layers[self.layer_idx]

    @layer.setter
    def layer(self, layer: Any) -> None:
        self.layers[self.layer_idx] = layer

    def states(self) -> list[Tensor]:
        layer = self.layer
        result = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [state for state in result if state is not None]


def bare_replica(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, without parameters, buffers and children.

    `copy.copy` would rewrite the copy of a rewritten module, and both would share one state.
    """
    cls: Any = original_class(module)
    if is_on_top(class_before(module)):
        raise Unsupported("a class was put on top of the one that was replaced")
    replica = cls.__new__(cls)
    nn.Module.__init__(replica)
    for name, value in vars(module).items():
        if name not in ATTRIBUTES_OF_MODULES:
            is_own = isinstance(value, types.MethodType) and value.__self__ is module
            vars(replica)[name] = types.MethodType(value.__func__, replica) if is_own else value
    return replica.eval()


def width_of(replica: nn.Module, run: Callable[[Tensor], Any]) -> int:
    """Elements of a token that a module takes: the first width of its layers with which it runs.

    Args:
        run: calls it with [1, 1, width].
    """
    widths = [getattr(part, name, 0) for name in ("in_features", "in_channels") for part in replica.modules()]
    runs = (width for width in widths if width and tried(run, torch.zeros(1, 1, width)) is not None)
    return next(runs)


class FewDirections(nn.Module):
    """A linear layer of the same sizes whose output depends on few directions of its input."""

    def __init__(self, layer: Any):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.directions = torch.randn(layer.in_features, _DIRECTIONS) * layer.in_features**-0.5
        self.rows = normal(_DIRECTIONS, layer.out_features)
        self.bias = None if layer.bias is None else normal(layer.out_features)

    @property
    def weight(self) -> Tensor:
        return (self.directions @ self.rows).T

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.directions @ self.rows
        return out if self.bias is None else out + self.bias


def is_linear(module: Any) -> bool:
    """True for a linear layer without code of its own model: a trial may have another one in its place."""
    cls = class_before(module)
    is_plain = cls.forward is nn.Linear.forward or not is_followed(cls.__module__)
    return is_plain and hasattr(module, "out_features")


def replica_of(module: Any, **attributes: Any) -> Any:
    """A module of the same class on the CPU: random parameters and buffers, other attributes.

    In every second draw its layer index is another one. The first draw has the module's own buffers.
    """
    if is_linear(module):
        return FewDirections(module)
    draw, replica = current(), bare_replica(module)
    if not is_first_kind() and isinstance(getattr(module, "layer_idx", None), int):
        replica.layer_idx += 1
    for name, parameter in module._parameters.items():
        replica.register_parameter(name, None if parameter is None else random_parameter(parameter.shape))
    for name, buffer in module._buffers.items():
        value = None if buffer is None else buffer.detach().cpu()
        if value is not None and value.is_floating_point():
            is_first, is_positive = draw is None or draw.number == 0, bool((value > 0).all())
            replacement = value.float() if is_first else random_parameter(value.shape).detach()
            # Positive ones are rates, of which a logarithm may be taken.
            value = replacement.abs() if is_positive else replacement
        replica.register_buffer(name, value)
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replica_of(child)
    vars(replica).update(attributes)
    return replica


def random_parameter(shape: Sequence[int]) -> nn.Parameter:
    """About 1 for rows; of matrices so that products have the size of what they multiply; times a magnitude.

    Rows of another draw than the first have both signs.
    """
    draw = current()
    values = torch.rand(shape) + 0.25 if len(shape) < 2 else torch.randn(shape) * shape[-1] ** -0.5
    if draw is not None and draw.number > 0 and len(shape) < 2:
        values = values * torch.where(torch.rand(shape) < 0.25, -1.0, 1.0)
    return nn.Parameter(values * magnitude(), requires_grad=False)


def numbers(*shape: int) -> Tensor:
    """Random ones about 0, the same for each shape in a draw."""
    draw = current()
    seed = sum(shape) + (0 if draw is None else 1000 * draw.number)
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5) * magnitude()


def untied(q: Tensor, k: Tensor) -> Tensor:
    """[B, T]: for which tokens at most one key has no head with a score above zero.

    relu leaves of others the score 0, and which of equal scores comes first is open.

    Args:
        q: [B, T, H, D].
        k: [B, S, D].
    """
    scores = torch.einsum("bthd,bsd->bths", q, k).relu().sum(2)
    return (scores == 0).sum(-1) < 2


class HeldKeys(HeldPools):
    """A cache of one layer that is its own layer: it holds an indexer's keys and has no room for more."""

    def __init__(self, keys: Tensor, layer_idx: int = 0):
        self.keys, self.layers = keys, {layer_idx: self}

    @property
    def indexer_keys(self) -> Tensor:
        return self.keys

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]

    def update_indexer(self, keys: Tensor, layer_idx: int = 0) -> Tensor:
        self.keys = torch.cat((self.keys, keys), -2)
        return self.keys

    def reserve_index(self, new: Tensor) -> None:
        return None

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        return pool(0, count)

    indexed = get_seq_length
