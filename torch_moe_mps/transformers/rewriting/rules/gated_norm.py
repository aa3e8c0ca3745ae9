"""RMSNorms whose result a gate multiplies: rms(x) * weight * silu(gate).

A module is recognised by running a copy of it on random numbers.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ..program.programs import forward_given, original_class
from ..program.reads import record
from ..record import RECORD, record_of
from .options import forward_of
from .trial import agrees, tried

ops = torch.ops.moe_mps

_EPS = ("variance_epsilon", "eps", "epsilon")
_TRIAL_EPS = 0.25  # large enough to tell where it is added
_WIDEST = 1024  # a norm of heads is not wider


def gated_norm_forward(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """The forward of a rewritten norm."""
    if x.shape != gate.shape or (options := _options(norm, x, gate)) is None:
        return original_class(norm).forward(norm, x, gate)
    return ops.rms_norm_gated(x, gate, *options)


def _options(norm: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, float, float] | None:
    """The weight, eps and offset of a rewritten norm, None where an operator cannot run it."""
    eps, offset = norm.__dict__[RECORD].formula
    weight = norm.weight
    fits = x.dtype == gate.dtype and x.shape[-1:] == weight.shape and weight.dtype in ACTIVATION_DTYPES
    if not fits or not x.device == gate.device == weight.device:
        return None
    return weight, getattr(norm, eps), offset


def is_gated_norm(module: nn.Module) -> bool:
    return forward_given(module)[0] is gated_norm_forward


def norm_of_heads(norm: nn.Module, heads: Tensor, gate: Tensor) -> dict[str, Any]:
    """What gated_delta_rule_ takes of a norm of its heads; nothing where the norm must be called."""
    is_called = forward_of(norm)[0] is not gated_norm_forward
    if is_called or gate.numel() != heads.numel() or (options := _options(norm, heads, gate)) is None:
        return {}
    weight, eps, offset = options
    return {"gate": gate.reshape(heads.shape), "norm_weight": weight, "norm_eps": eps, "norm_offset": offset}


def rewrite_gated_norm(module: nn.Module) -> tuple[Callable, str] | None:
    """(forward, what it runs) for a norm with a gate, else None."""
    own = original_class(module).forward
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = next((name for name in _EPS if isinstance(getattr(module, name, None), float)), None)
    arguments = list(inspect.signature(own).parameters.values())
    if eps is None or len(arguments) != 3 or len(parameters) != 1 or weight is None or weight.dim() != 1:
        return None
    if weight.shape[0] > _WIDEST or any(a.kind is not a.POSITIONAL_OR_KEYWORD for a in arguments):
        return None
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, str)) and name != "training":
            record(module, name)
    offset = _offset(module, own, eps, weight.shape[0])
    if offset is None:
        return None
    record_of(module).formula = (eps, offset)
    return gated_norm_forward, "rms_norm_gated"


def _offset(module: nn.Module, own: Callable, eps: str, width: int) -> float | None:
    """What the module adds to its weight, if the operator computes what it computes."""
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(4, width, generator=generator) for _ in range(2))
    trial = copy.copy(module)
    trial.__dict__ = {**module.__dict__, "_parameters": {"weight": torch.rand(width, generator=generator)}}
    trial.__dict__[eps] = _TRIAL_EPS
    result, narrow = tried(own, trial, x, gate), tried(own, trial, x.bfloat16(), gate.bfloat16())
    if not all(isinstance(r, Tensor) for r in (result, narrow)) or narrow.dtype != torch.bfloat16:
        return None
    for offset in (0.0, 1.0):
        ours = ops.rms_norm_gated(x, gate, trial.weight, _TRIAL_EPS, offset)
        if agrees(ours, result):
            return offset
    return None
