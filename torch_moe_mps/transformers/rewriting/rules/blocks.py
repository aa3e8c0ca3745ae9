"""Calls of blocks by a layer: the norm in front and the residual behind go into the block's operators.

A block that can take them has options for it: its first operators norm their input, where there is one token,
and its last operator adds the residual.
"""

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...experts import NormArguments, is_observed, normed
from ...interface import is_experts
from ...linears import OrderedLinear, QuantizedLinear
from ...report import Done
from ..program.building import add_option
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .norms import is_norm, norm_options
from .options import NORM, RESIDUAL, forward_of, takes
from .rms_norm import rms_norm

ops = torch.ops.moe_mps

INPUT = "hidden_states"  # the argument of blocks that are called by keywords


@called
def call_block(
    block: nn.Module,
    x: Tensor,
    norm: nn.Module | None,
    residual: Tensor | None,
    name: str | None,
    /,
    **options: Any,
) -> Tensor | tuple:
    """residual + block(norm(x), ...), of several results to the first. `name`: x is this keyword argument."""
    forward, has = forward_of(block)
    if norm is not None:
        given = norm_options(norm, x) if NORM in has else None
        if given is None:
            x = rms_norm(norm, x)
        else:
            options[NORM] = given
    if RESIDUAL in has and residual is not None and (residual is x or residual.shape == x.shape):
        options[RESIDUAL], residual = residual, None
    if forward is not None:
        out = forward(block, x, **options)
    else:
        out = block(x, **options) if name is None else block(**{name: x}, **options)
    if residual is None:
        return out
    return (residual + out[0], *out[1:]) if isinstance(out, tuple) else residual + out


@called
def behind(norm: nn.Module, function: Callable, module: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
    """function(module, norm(x), ...) of a function that takes the option of a norm."""
    given = norm_options(norm, x)
    out: Tensor = function(module, rms_norm(norm, x) if given is None else x, *others, moe_mps_norm=given)
    return out


@called
def hand_on(block: nn.Module, x: Tensor, moe_mps_norm: NormArguments | None) -> Any:
    """block(norm(x)), where the calling block has the option of a norm."""
    forward, has = forward_of(block)
    if forward is None or NORM not in has:
        return block(normed(moe_mps_norm, x))
    return forward(block, x, moe_mps_norm=moe_mps_norm)


@called
def linear(
    layer: nn.Module,
    x: Tensor,
    moe_mps_norm: NormArguments | None = None,
    moe_mps_residual: Tensor | None = None,
) -> Tensor:
    """layer(norm(x)) + residual, which has as many elements."""
    norm, residual = moe_mps_norm, moe_mps_residual
    is_same = residual is None or residual.dtype is x.dtype
    if not isinstance(layer, QuantizedLinear) or is_observed(layer) or not is_same:
        out: Tensor = layer(normed(norm, x))
        return out if residual is None else residual.reshape(out.shape) + out
    if isinstance(layer, OrderedLinear):
        x, norm = normed(norm, x).index_select(-1, layer.order), None
    form, weights = layer.format, layer.weights()
    if residual is not None and residual.shape[:-1] != x.shape[:-1]:
        residual = residual.reshape((*x.shape[:-1], weights[0].shape[0]))
    return ops.linear_quantized(x, *weights, form.name, residual, None, *(norm or ()))


# Blocks that get the option of a residual


def _ends_in_experts(match: Match) -> Done | None:
    if "EXPERTS" in match.values and not is_experts(match.module("EXPERTS")):
        return None
    add_option(match.program, RESIDUAL)
    return Done("moe_experts", "moe_experts adds the residual")


def _ends_in_linear(match: Match) -> Done | None:
    if not isinstance(match.module("LINEAR"), QuantizedLinear) or RESIDUAL in match.program.arguments_names():
        return None
    add_option(match.program, RESIDUAL)
    return Done(None, f"{match.child('LINEAR')} adds the residual")


TAKE_RESIDUAL = (
    Rewrite(
        "return shaped(experts_with_shared(*ARGS))",
        f"return shaped(experts_with_shared(*ARGS, residual={RESIDUAL}))",
        where=_ends_in_experts,
    ),
    Rewrite(
        "return shaped(EXPERTS(X, IDS, WEIGHTS))",
        f"return shaped(experts_with_shared(EXPERTS, X, IDS, WEIGHTS, residual={RESIDUAL}))",
        where=_ends_in_experts,
    ),
    Rewrite(
        "return shaped(LINEAR(X))",
        f"return shaped(linear(LINEAR, X, {RESIDUAL}={RESIDUAL}))",
        where=_ends_in_linear,
    ),
)


# Layers that hand over residuals and norms


def _takes_residual(match: Match) -> Done | None:
    found = takes(match.module("BLOCK"), RESIDUAL)
    return Done(None, f"{match.child('BLOCK')} adds the residual") if found else None


def _forms(call: str, new: str) -> tuple[Rewrite, ...]:
    return tuple(
        Rewrite(f"S = R + {around.format(call)}", f"S = {around.format(new)}", where=_takes_residual)
        for around in ("{}", "{}[0]", "first_of({})")
    )


HAND_OVER_RESIDUAL = (
    *_forms("BLOCK(X, **OPTIONS)", "call_block(BLOCK, X, None, R, None, **OPTIONS)"),
    *_forms(f"BLOCK({INPUT}=X, **OPTIONS)", f"call_block(BLOCK, X, None, R, '{INPUT}', **OPTIONS)"),
)


def _hands_norm_over(match: Match) -> Done | None:
    """Whether NORM is an RMSNorm with a weight. One of a sum stays: both are one operator."""
    is_sum = isinstance(match.program.follow(match.values["X"]), ast.BinOp)
    if is_sum or not is_norm(match.module("NORM"), weighted=True):
        return None
    return Done("rms_norm", f"rms_norm ({match.child('NORM')} in {match.child('BLOCK')})")


def _takes_norm(match: Match) -> Done | None:
    is_child = ast.unparse(match.values["BLOCK"]).startswith("self.")
    found = is_child and takes(match.module("BLOCK"), NORM)
    return _hands_norm_over(match) if found else None


def _is_linear(match: Match) -> Done | None:
    return _hands_norm_over(match) if isinstance(match.module("BLOCK"), QuantizedLinear) else None


def _is_experts(match: Match) -> Done | None:
    return _hands_norm_over(match) if is_experts(match.module("BLOCK")) else None


HAND_OVER_NORM = (
    Rewrite(
        "BLOCK(NORM(X), IDS, WEIGHTS)",
        "behind(NORM, _moe_mps.experts_with_shared, BLOCK, X, IDS, WEIGHTS)",
        where=_is_experts,
    ),
    Rewrite("BLOCK(NORM(X))", "behind(NORM, _moe_mps.linear, BLOCK, X)", where=_is_linear),
    Rewrite(
        "BLOCK(NORM(X), **OPTIONS)", "call_block(BLOCK, X, NORM, None, None, **OPTIONS)", where=_takes_norm
    ),
    Rewrite(
        f"BLOCK({INPUT}=NORM(X), **OPTIONS)",
        f"call_block(BLOCK, X, NORM, None, '{INPUT}', **OPTIONS)",
        where=_takes_norm,
    ),
    Rewrite(
        "call_block(BLOCK, NORM(X), NO_NORM, R, NAME, **OPTIONS)",
        "call_block(BLOCK, X, NORM, R, NAME, **OPTIONS)",
        where=_takes_norm,
    ),
)
