"""Modules that are one operator: rows of formulas and operators, and one forward for all of them.

    Rows("rms_norm", ("X",), [("W * (X * rsqrt(mean(X * X, [-1], True) + EPS))", "rms_norm(X, W, EPS)")])

A row applies to a module without children whose forward, traced, gives the formula for inputs of all shapes
and dtypes, if all that it computes goes row by row, and if the operator's own checks take the arguments.
"""

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...ops import FAMILIES
from ..basics.report import Done
from ..basics.state import STATE, state_of
from ..graphs.nodes import aten, is_call, tensor_of
from ..graphs.patterns import called, match, parsed, uncast
from ..graphs.tracing import VALUE
from .traced import (
    DTYPES,
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

_MIXED = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))  # the input's and the weights'
_WITHOUT_WEIGHT = 24  # the width that such a module is traced with


class Call(NamedTuple):
    """operator(*inputs, *weights, *constants), which is what a module computes.

    Attributes:
        operator: its name.
        inputs: names of the forward's arguments, in their order.
        weights: names of parameters.
        mixes: the result has the dtype of the first input, whatever the weights have.
        width: columns of the inputs where no parameter has as many; None for any.
        groups: so many groups of neighbouring columns are computed apart.
    """

    operator: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    constants: tuple[Any, ...]
    mixes: bool
    width: int | None = None
    groups: int = 1

    def by_place(self, args: tuple, named: dict[str, Any]) -> tuple:
        """Arguments in their order; none where the forward takes others."""
        names = self.inputs[len(args) :]
        return (*args, *map(named.get, names)) if named.keys() == {*names} else ()


class Rows:
    """A rule of modules that is data: a module -> the forward that it runs, and what that is, or None.

    Args:
        name: of the rule.
        inputs: for each argument of the forward the names that stand for it in formulas: "X Y" where X is
            the argument in its own dtype and Y in another one.
        rows: (formula, operator), tried in this order. The operator takes the inputs, then
            parameters of the module, then numbers.
        widest: wider rows run the eager forward.
    """

    def __init__(
        self, name: str, inputs: Sequence[str], rows: Sequence[tuple[str, str]], widest: int | None = None
    ):
        self.__name__ = f"rewrite_{name}"
        self.inputs, self.rows, self.widest = [item.split() for item in inputs], rows, widest
        self.call_of = remembered(self._call_of)

    def __call__(self, module: nn.Module) -> tuple[Callable, list[Done]] | None:
        call = self.call_of(module)
        if call is None:
            return None
        state_of(module).formula = call
        return forward_of(call.operator), [Done(call.operator)]

    def _call_of(self, module: nn.Module) -> Call | None:
        """How a module computes a row, if it does so for all shapes and dtypes of its inputs."""
        weights = [parameter for parameter in module._parameters.values() if parameter is not None]
        are_rows = all(item.dim() == 1 for item in weights)
        names = names_of_inputs(module)
        if module._modules or not are_rows or names is None or len(names) != len(self.inputs):
            return None
        # A forward that depends on this attribute reads it in the trace, so that it is remembered with it.
        stated = next(iter(getattr(module, "normalized_shape", ())), None)
        width = weights[0].shape[0] if weights else stated or _WITHOUT_WEIGHT
        if self.widest is not None and width > self.widest:
            return None

        def ask(sizes: Sizes, dtype: torch.dtype, weight: torch.dtype | None = None) -> Call | None:
            inputs = [Input((*sizes, width), dtype)] * len(names)
            traced = trace(module, *inputs, weights=weight or dtype)
            return None if traced is None else self.read(traced, names)

        call = everywhere(ask)
        if call is None or not call.mixes:
            return None
        if not call.weights:
            return call._replace(width=stated)
        return _of_mixed_dtypes(call, [ask(SIZES[0], *dtypes) for dtypes in _MIXED])

    def read(self, traced: Traced, names: tuple[str, ...]) -> Call | None:
        """The row in what a module computes; `mixes`: the result has the dtype of the first input here."""
        x, result = traced.inputs[0], traced.result
        if not isinstance(result, fx.Node) or not all(_is_of_rows(node, x) for node in traced.graph.nodes):
            return None
        for formula, new in self.rows:
            bound = match(formula, result)
            if bound is not None and self._reads(traced, bound):
                call = self._call(new, bound, traced, names)
                if call is not None:
                    return call
        return None

    def _reads(self, traced: Traced, bound: dict[str, Any]) -> bool:
        """True if the names of each input stand for it, in whatever dtype."""
        read = [{uncast(bound[name]) for name in own if name in bound} for own in self.inputs]
        return read == [{item} for item in traced.inputs]

    def _call(self, new: str, bound: dict[str, Any], traced: Traced, names: tuple[str, ...]) -> Call | None:
        """An operator with parameters and numbers of the module, None if it does not take them."""
        form: Any = parsed(new)
        arguments = form.args[len(self.inputs) :]
        values = [
            bound[argument.id] if isinstance(argument, ast.Name) else ast.literal_eval(argument)
            for argument in arguments
        ]
        weights = {path: value for value in values if (path := path_of(value)) is not None}
        constants = tuple(values[len(weights) :])
        if any(isinstance(value, fx.Node) for value in constants):
            return None
        mixes = tensor_of(traced.result).dtype == tensor_of(traced.inputs[0]).dtype
        call = Call(called(form), names, tuple(weights), constants, mixes, groups=_groups(traced))
        tensors = [[tensor_of(uncast(item)) for item in some] for some in (traced.inputs, weights.values())]
        try:
            out = applied(operator_of(call.operator), call, *tensors)
        except (ValueError, RuntimeError):
            return None
        return call if out.shape == tensor_of(traced.result).shape else None


def _groups(traced: Traced) -> int:
    (x, *_), nodes = traced.inputs, traced.graph.nodes
    means = [tensor_of(node) for node in nodes if is_call(node, aten.mean)]
    return means[0].numel() // tensor_of(x).shape[:-1].numel() if means else 1


def _is_of_rows(node: fx.Node, x: fx.Node) -> bool:
    """True if a node has the rows of the input, or of its groups, one number for each, or what all share."""
    if node.op == "output":
        return True
    value, *rows, width = node.meta[VALUE], *tensor_of(x).shape
    for item in value if isinstance(value, (tuple, list)) else [value]:
        if not isinstance(item, Tensor) or item.dtype not in DTYPES:
            return False
        *leading, last = item.shape or (0,)
        of_groups = leading[:-1] == rows and last in (1, width // max(1, leading[-1]))
        if [*item.shape] not in ([*rows, width], [*rows, 1], [width]) and not of_groups:
            return False
    return True


# Forwards that run


@functools.cache
def operator_of(name: str) -> Callable:
    return next(vars(family)[name] for family in FAMILIES.values() if name in vars(family))


@functools.cache
def forward_of(name: str) -> Callable:
    """The forward of modules that are this operator."""
    operator = operator_of(name)

    def forward(module: nn.Module, *args: Any, **named: Any) -> Tensor:
        call: Call = module.__dict__[STATE].formula
        inputs = call.by_place(args, named) if named else args
        weights = weights_of(module, call, inputs)
        if weights is None:
            return NotImplemented
        if call.groups == 1:
            return operator(*inputs, *weights, *call.constants)
        return applied(operator, call, inputs, weights)

    return forward


def _of_mixed_dtypes(call: Call, mixed: list[Call | None]) -> Call | None:
    """A call, or the same of weights in the dtype of the inputs alone, if no mixture of dtypes is another."""
    other = call._replace(mixes=False)
    if not {call, other}.issuperset(mixed):
        return None
    return call if mixed == [call] * len(mixed) else other


def applied(operator: Callable, call: Call, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Result of an operator for groups of columns."""
    if call.groups == 1:
        return operator(*inputs, *weights, *call.constants)
    apart = [item.unflatten(-1, (call.groups, -1)) for item in inputs]
    of_groups = [weight.view(call.groups, -1) for weight in weights]
    return operator(*apart, *of_groups, *call.constants).flatten(-2)


def weights_of(module: nn.Module, call: Call, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """Parameters that the operator takes beside the inputs; None where the eager forward must run."""
    _, names, wanted, _, mixes, width, _ = call  # at once, as this runs in each call of a module
    if len(inputs) != len(names):
        return None
    x, own, weights = inputs[0], module.__dict__, []
    dtype, columns = x.dtype, x.size(-1)
    for other in inputs[1:]:
        if not isinstance(other, Tensor) or other.dtype is not dtype or other.shape != x.shape:
            return None
    if not dtype.is_floating_point or width not in (None, columns):
        return None
    for name in wanted:
        weight = own["_parameters"].get(name)
        if weight is None or name in own:  # something written over the parameter
            weight = getattr(module, name)
        if weight is None or weight.numel() != columns or not (mixes or weight.dtype is dtype):
            return None
        weights.append(weight)
    return weights
