"""Hyper-connections: a residual of several streams, which the blocks of a layer read as one row.

The modules that mix streams are recognised by running them on small numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops.families.hyper_connection import MAX_STREAMS
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from ...trials.comparing import agrees
from ...trials.draws import eager, normal
from ...trials.forms import first_form
from ...trials.replicas import replica_of

ops = torch.ops.moe_mps

_TENSORS = (("fn", "base", "scale"), ("hc_fn", "hc_base", "hc_scale"))


class Mixing(NamedTuple):
    """Formula of a module that mixes streams.

    Attributes:
        tensors: the names of its parameters.
        numbers: arguments of the operator.
        parts: of fn.
    """

    tensors: tuple[str, str, str]
    numbers: dict[str, Any]
    parts: int


def connection_forward(module: nn.Module, hidden_streams: Tensor) -> Any:
    """Input of a block, behind the weights post and comb as far as the module has them."""
    mixing: Mixing = module.__dict__[STATE].formula
    tensors = map(module._parameters.get, mixing.tensors)
    x, post, comb, _ = ops._hyper_connection(hidden_streams, *tensors, **mixing.numbers)
    return x if mixing.parts == 1 else (post, x) if mixing.parts == 2 else (post, comb, x)


def rewrite_hyper_connection(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a module that mixes the streams of a hyper-connection, else None."""
    parameters = module._parameters
    tensors = next(
        (names for names in _TENSORS if all(parameters.get(name) is not None for name in names)), None
    )
    count, norm = getattr(module, "hc_mult", 0), module._modules.get("input_norm")
    if tensors is None or norm is None or not isinstance(count, int) or not 1 <= count <= MAX_STREAMS:
        return None
    fn: Any = parameters[tensors[0]]
    rows = (count, 2 * count, (2 + count) * count)
    if fn.dim() != 2 or fn.shape[0] not in rows or fn.shape[1] % (4 * count):
        return None
    mixing = _mixing_of(module, tensors, rows.index(fn.shape[0]) + 1)
    mixing = first_form(module, (mixing,), _trial, tensors)
    if mixing is None:
        return None
    state_of(module).formula = mixing
    return connection_forward, [Done("_hyper_connection")]


def _mixing_of(module: Any, tensors: tuple[str, str, str], parts: int) -> Mixing:
    """The only formula that a module with such tensors may have."""
    eps = getattr(module, "hc_eps", getattr(module, "eps", None))
    numbers = {
        "norm_eps": getattr(module.input_norm, "eps", None),
        "mix_eps": eps,
        "iterations": getattr(module, "hc_sinkhorn_iters", 1),
        "post_factor": getattr(module, "hc_post_magnitude", 2.0),
        "post_eps": eps if parts == 2 else 0.0,
    }
    return Mixing(tensors, numbers, parts)


def _trial(module: Any, tensors: tuple[str, str, str]) -> Callable[[Mixing], bool]:
    replica = replica_of(module)
    columns = module._parameters[tensors[0]].shape[1]
    streams = normal(2, 3, module.hc_mult, columns // module.hc_mult)
    expected = eager(original_class(module).forward)(replica, streams)

    def holds(mixing: Mixing) -> bool:
        state_of(replica).formula = mixing
        return agrees(connection_forward(replica, streams), expected)

    return holds
