"""RMSNorms and LayerNorms: modules without children whose trace is one call of an operator.

A row is a formula and the operator that computes it. Rows that find a bare norm come first; others add its
weight, bias or gate. What they leave of a trace must be a single call, for inputs of all shapes and dtypes.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ....ops.families.norms import layer_norm, rms_norm, rms_norm_gated
from ...basics.report import Done
from ...basics.state import EMPTY_STATE, STATE, state_of
from ...graphs.fusion import Fusion
from ...graphs.nodes import beneath, is_node, name_of, tensor_of
from ...graphs.passes.simplify import drop_unused
from ...graphs.patterns import uncast
from ..traced import (
    RANKS,
    SIZES,
    Input,
    Sizes,
    Traced,
    everywhere,
    names_of_inputs,
    path_of,
    remembered,
    trace,
)

NormArguments: TypeAlias = tuple[Any, float, float]  # weight, eps and offset of a norm in an operator

_MIXED = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))  # the input's and the weights'
_WITHOUT_WEIGHT = 24  # the width that such a module is traced with
_MOST_INPUTS = 2
_OPERATORS: dict[str, Callable] = {each.__name__: each for each in (rms_norm, layer_norm, rms_norm_gated)}
_WIDEST_OF_HEADS = 1024
_ROOTS = ("Y * rsqrt({} + EPS)", "Y * pow({} + EPS, -0.5)", "Y / sqrt({} + EPS)")
_MEANS = ("mean(pow(X, 2), [-1], True)", "mean(X * X, [-1], True)")
_CENTRED = "({Z} - mean({Z}, [-1], True))"


def _is_one_value(X: Any = None, Y: Any = None, GATE: Any = None, **_: Any) -> bool:
    """True if X and Y are one value, in any dtypes, and a gate is no wider than a head."""
    if GATE is not None:
        return tensor_of(GATE).shape[-1] <= _WIDEST_OF_HEADS
    return X is None or (uncast(X) is uncast(Y) and tensor_of(X).shape == tensor_of(Y).shape)


_NORMS = Fusion(
    "norms",
    *(
        (
            root.replace("Y", _CENTRED.format(Z="Y")).format(
                f"mean(pow({_CENTRED.format(Z='X')}, 2), [-1], True)"
            ),
            "layer_norm(X, None, None, EPS, 0.0)",
        )
        for root in _ROOTS
    ),
    *((root.format(mean), "rms_norm(X, None, EPS, 0.0)") for root in _ROOTS for mean in _MEANS),
    ("item(native_layer_norm(Y, [N], W[H,] + 1.0, B, EPS), 0)", "layer_norm(Y, W, B, EPS, 1.0)"),
    ("item(native_layer_norm(Y, [N], W, B, EPS), 0)", "layer_norm(Y, W, B, EPS, 0.0)"),
    ("(W[H,] + 1.0) * rms_norm(Y, None, EPS)", "rms_norm(Y, W, EPS, 1.0)"),
    ("W[H,] * rms_norm(Y, None, EPS)", "rms_norm(Y, W, EPS, 0.0)"),
    ("(W[H,] + 1.0) * rms_norm(Y[..., G, N], None, EPS)[..., H]", "rms_norm(Y, W[G, N], EPS, 1.0)"),
    ("W[H,] * rms_norm(Y[..., G, N], None, EPS)[..., H]", "rms_norm(Y, W[G, N], EPS, 0.0)"),
    ("(W[H,] + 1.0) * layer_norm(Y, None, None, EPS)", "layer_norm(Y, W, None, EPS, 1.0)"),
    ("W[H,] * layer_norm(Y, None, None, EPS)", "layer_norm(Y, W, None, EPS, 0.0)"),
    ("layer_norm(Y, W, None, EPS, OFFSET) + B[H,]", "layer_norm(Y, W, B, EPS, OFFSET)"),
    ("rms_norm(Y, W, EPS, OFFSET) * silu(GATE)", "rms_norm_gated(Y, GATE, W, EPS, OFFSET)"),
    ("W[H,] * rms_norm(Y, None, EPS) * silu(GATE)", "rms_norm_gated(Y, GATE, W, EPS, 0.0)"),  # W is wider
    ("(W[H,] + 1.0) * rms_norm(Y, None, EPS) * silu(GATE)", "rms_norm_gated(Y, GATE, W, EPS, 1.0)"),
    where=_is_one_value,
)


class NormCall(NamedTuple):
    """operator(*inputs, *weights, *absent, **numbers), which is what a module computes.

    Attributes:
        operator: its name.
        inputs: names of the forward's arguments, in their order.
        weights: names of parameters.
        absent: None for each weight that the operator could have after these.
        numbers: by the names of the operator's arguments.
        mixes: the result has the dtype of the first input, whatever the weights have.
        width: columns of the inputs where no parameter has as many; None for any.
        groups: so many groups of neighbouring columns are computed apart.
    """

    operator: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    absent: tuple[None, ...]
    numbers: dict[str, Any]
    mixes: bool
    width: int | None = None
    groups: int = 1

    def by_place(self, args: tuple, named: dict[str, Any]) -> tuple:
        """Arguments in their order; none where the forward takes others."""
        names = self.inputs[len(args) :]
        return (*args, *map(named.get, names)) if named.keys() == {*names} else ()


def rewrite_norm(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a norm, else None."""
    call = call_of(module)
    if call is None:
        return None
    state_of(module).formula = call
    return forward_of(call.operator), [Done(call.operator)]


@remembered
def call_of(module: nn.Module) -> NormCall | None:
    """The operator that a module without children computes, for inputs of all shapes and dtypes."""
    weights = [parameter for parameter in module._parameters.values() if parameter is not None]
    names = names_of_inputs(module)
    if module._modules or any(item.dim() != 1 for item in weights) or not names or len(names) > _MOST_INPUTS:
        return None
    # A forward that depends on this attribute reads it in the trace, so that it is remembered with it.
    stated = next(iter(getattr(module, "normalized_shape", ())), None)
    width = weights[0].shape[0] if weights else stated or _WITHOUT_WEIGHT

    def ask(sizes: Sizes, dtype: torch.dtype, weight: torch.dtype | None = None) -> NormCall | None:
        example = Input((*sizes, width), dtype, is_wide=bool(weights or stated))
        traced = trace(module, *[example] * len(names), weights=weight or dtype)
        return None if traced is None else read(traced, names)

    call = everywhere(ask)
    if call is None or not call.weights:
        return call and call._replace(width=stated)
    return call._replace(mixes=all(ask(SIZES[0], *dtypes) == call for dtypes in _MIXED))


def read(traced: Traced, names: tuple[str, ...]) -> NormCall | None:
    """The call of an operator that is all that a module computes."""
    _NORMS(traced.graph)
    drop_unused(traced.graph)
    result: Any = traced.graph.output_node().args[0]
    if len(result) != 1:
        return None
    node = beneath(result[0])
    name = name_of(node)
    if name not in _OPERATORS or node.args:  # not one that rows have made
        return None
    like, inputs = tensor_of(traced.inputs[0]), traced.inputs
    values: list[Any] = [*node.kwargs.items()]
    x, others = [value for _, value in values[: len(inputs)]], values[len(inputs) :]
    weights = {path: value for _, value in others if (path := path_of(value)) is not None}
    others = others[len(weights) :]
    numbers = {name: value for name, value in others if value is not None}
    rows, groups = tensor_of(x[0]).shape, tensor_of(x[0]).dim() - like.dim()
    is_own = rows[: like.dim() - 1] == like.shape[:-1] and tensor_of(result[0]).shape == like.shape
    if [beneath(item) for item in x] != [*inputs] or not is_own or any(map(is_node, numbers.values())):
        return None
    groups = rows[-2] if groups else 1
    absent = (None,) * (len(others) - len(numbers))
    return NormCall(name, names, tuple(weights), absent, numbers, True, groups=groups)


# Forwards that run


@functools.cache
def forward_of(name: str) -> Callable:
    """The forward of modules that are this operator."""
    operator = _OPERATORS[name]

    def forward(module: nn.Module, *args: Any, **named: Any) -> Tensor:
        call: NormCall = module.__dict__[STATE].formula
        inputs = call.by_place(args, named) if named else args
        weights = weights_of(module, call, inputs)
        if weights is None or inputs[0].dim() not in RANKS:
            return NotImplemented
        if call.groups == 1:
            return operator(*inputs, *weights, *call.absent, **call.numbers)
        return _for_groups(operator, call, inputs, weights)

    return forward


def _for_groups(
    operator: Callable, call: NormCall, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """Result of an operator for groups of columns."""
    apart = [item.unflatten(-1, (call.groups, -1)) for item in inputs]
    of_groups = [weight.view(call.groups, -1) for weight in weights]
    return operator(*apart, *of_groups, *call.absent, **call.numbers).flatten(-2)


def weights_of(module: nn.Module, call: NormCall, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """Parameters that the operator takes beside the inputs; None where the eager forward must run."""
    _, names, wanted, _, _, mixes, width, _ = call  # at once, as this runs in each call of a module
    if len(inputs) != len(names):
        return None
    x, attributes, weights = inputs[0], module.__dict__, []
    dtype, columns = x.dtype, x.size(-1)
    for other in inputs[1:]:
        if not isinstance(other, Tensor) or other.dtype is not dtype or other.shape != x.shape:
            return None
    if not dtype.is_floating_point or width not in (None, columns):
        return None
    for name in wanted:
        weight = attributes["_parameters"].get(name)
        if weight is None or name in attributes:  # something written over the parameter
            weight = getattr(module, name)
        if weight is None or weight.shape != (columns,) or not (mixes or weight.dtype is dtype):
            return None
        weights.append(weight)
    return weights


@functools.cache
def warn_of_traces() -> None:
    """Warns, once in a process, if even torch's own norm has no formula in its trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, for inputs and weights of two dtypes
        call = call_of(nn.RMSNorm(8))
    if call is None:
        warnings.warn(
            f"torch_moe_mps: traces of torch {torch.__version__} do not show what modules compute; "
            "norms, MLPs, routers and rotary tables run unmodified",
            stacklevel=3,
        )


# Norms inside of what other rules replace


def is_norm(module: nn.Module, weighted: bool | None = None) -> bool:
    """True if a module is an RMSNorm of whole rows, with a weight, without (False) or either (None).

    Its state has the call from then on. A forward that is rewritten meanwhile rests on it.
    """
    call = call_of(module)
    if (
        call is None
        or call.operator != "rms_norm"
        or call.groups > 1
        or weighted not in (None, bool(call.weights))
    ):
        return False
    state_of(module).formula = call
    return True


def norm_arguments(norm: nn.Module, x: Tensor) -> NormArguments | None:
    """The weight, None without one, its eps and its offset; None where only the eager forward norms it.

    Args:
        x: as wide as the rows that are normed, and of their dtype.
    """
    call: NormCall | None = norm.__dict__.get(STATE, EMPTY_STATE).formula
    weights = None if call is None or call.groups > 1 else weights_of(norm, call, (x,))
    if call is None or weights is None:
        return None
    return next(iter(weights), None), call.numbers["norm_eps"], call.numbers["norm_weight_offset"]
