"""Hyper-connections: a residual of several streams, which the blocks of a layer read as one row.

The modules that mix streams are recognised by running them on small numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops.hyper_connection import MAX_STREAMS
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from .trial import agrees, bare_twin, tried

ops = torch.ops.moe_mps

_TENSORS = (("fn", "base", "scale"), ("hc_fn", "hc_base", "hc_scale"))
_NUMBERS = ("hc_mult", "hc_eps", "eps", "hc_sinkhorn_iters", "hc_post_magnitude")
_WIDTH = 8  # of a stream in a trial


class Mixing(NamedTuple):
    """What a module that mixes streams computes.

    Attributes:
        tensors: the names of its parameters.
        numbers: arguments of the operator.
        parts: those of fn.
    """

    tensors: tuple[str, str, str]
    numbers: dict[str, Any]
    parts: int


def connection_forward(module: nn.Module, hidden_streams: Tensor) -> Any:
    """What a block reads; behind the weights post and comb, as far as the module has them."""
    mixing: Mixing = module.__dict__[STATE].formula
    tensors = map(module._parameters.get, mixing.tensors)
    x, post, comb, _ = ops.hyper_connection(hidden_streams, *tensors, **mixing.numbers)
    return x if mixing.parts == 1 else (post, x) if mixing.parts == 2 else (post, comb, x)


def rewrite_hyper_connection(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a module that mixes the streams of a hyper-connection, else None."""
    own = module._parameters
    tensors = next((names for names in _TENSORS if all(own.get(name) is not None for name in names)), None)
    count, norm = getattr(module, "hc_mult", 0), module._modules.get("input_norm")
    if tensors is None or norm is None or not isinstance(count, int) or not 1 <= count <= MAX_STREAMS:
        return None
    fn: Any = own[tensors[0]]
    rows = (count, 2 * count, (2 + count) * count)
    if fn.dim() != 2 or fn.shape[0] not in rows or fn.shape[1] % (4 * count):
        return None
    for name in _NUMBERS:
        if hasattr(module, name):
            depends_on(module, name)
    depends_on(norm, "eps")
    parts = rows.index(fn.shape[0]) + 1
    eps = getattr(module, "hc_eps", getattr(module, "eps", None))
    numbers = {
        "norm_eps": norm.eps,
        "eps": eps,
        "iterations": getattr(module, "hc_sinkhorn_iters", 1),
        "post_factor": getattr(module, "hc_post_magnitude", 2.0),
        "post_eps": eps if parts == 2 else 0.0,
    }
    mixing = Mixing(tensors, numbers, parts)
    if not tried(_mixes, module, mixing, count):
        return None
    state_of(module).formula = mixing
    return connection_forward, [Done("hyper_connection")]


def _twin(module: nn.Module, mixing: Mixing, count: int) -> Any:
    """A module of the same class with few and random numbers."""
    twin = bare_twin(module)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        name: (tensor.shape[0], *[count * _WIDTH] * (tensor.dim() - 1))
        for name in mixing.tensors
        if (tensor := module._parameters[name]) is not None
    }
    numbers = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
    parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in numbers.items()}
    norm: Any = module._modules["input_norm"]
    vars(twin).update(_parameters=parameters, _modules={"input_norm": bare_twin(norm)})
    state_of(twin).formula = mixing
    return twin


def _mixes(module: nn.Module, mixing: Mixing, count: int) -> bool:
    twin = _twin(module, mixing, count)
    streams = torch.randn(2, 3, count, _WIDTH, generator=torch.Generator().manual_seed(1))
    return agrees(connection_forward(twin, streams), original_class(module).forward(twin, streams))
