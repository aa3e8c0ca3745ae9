"""Dense MLPs and shared experts with quantised weights.

Gate, up and activation are one dispatch, down is one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ....ops._activations import Activation
from ....ops._decoded import with_decoded_weights
from ....ops.families.linear import _mlp_quantized
from ...basics.experts import activation_arguments
from ...basics.report import Done
from ...basics.state import STATE, state_of
from ...graphs.nodes import aten, is_call, tensor_of
from ...graphs.patterns import linear_of, match, uncast
from ...graphs.tracing import ITEM
from ..experts import (
    ACTIVATION_FORMS,
    activation_with,
    halves_of,
    numbers_of,
)
from ..linears import QuantizedLinear
from ..traced import RANKS, Input, Sizes, Traced, everywhere, names_of_inputs, remembered, trace
from .linear import join, layer_of

# The gate and the other half: of two layers, and of one.
_HALVES = (("linear(X, GATE, GATE_BIAS)", "linear(X, UP, UP_BIAS)"), ("G", "U"))
_FORMS = [
    (name, f"linear({form.format(G=g, U=u)}, DOWN, DOWN_BIAS)")
    for g, u in _HALVES
    for name, form in ACTIVATION_FORMS
    if g != "G" or "{U}" in form
]


class MlpFormula(NamedTuple):
    """down(activation(gate(x), up(x))), which one layer may give, or down(activation(gate(x))).

    Attributes:
        first: the names of gate and up, or of the layer that is both.
    """

    activation: Activation
    first: tuple[str, ...]
    down: str


@remembered
def mlp_formula(module: nn.Module) -> MlpFormula | None:
    """Form of the MLP that a module of quantised layers computes; None for any other computation."""
    layers = [item for item in module._modules.values() if isinstance(item, QuantizedLinear)]
    if len(layers) < 2 or len(names_of_inputs(module) or ()) != 1:
        return None
    for width in dict.fromkeys(layer.columns for layer in layers):

        def ask(sizes: Sizes, dtype: torch.dtype, width: int = width) -> MlpFormula | None:
            traced = trace(module, Input((*sizes, width), dtype), weights=dtype)
            return None if traced is None else _read_mlp(traced)

        formula = everywhere(ask)
        if formula is None or _casts(module, width):
            continue
        if all(isinstance(module._modules[name], QuantizedLinear) for name in (*formula.first, formula.down)):
            return formula
    return None


def _casts(module: nn.Module, width: int) -> bool:
    """True if a module casts its input, to the dtype of its weights."""
    traced = trace(module, Input((7, width), torch.bfloat16), weights=torch.float32)
    users = () if traced is None else traced.inputs[0].users
    return any(is_call(user, aten._to_copy) for user in users)


def _read_mlp(traced: Traced) -> MlpFormula | None:
    """The layers and the activation of a trace that is an MLP; None for any other."""
    (x,), result = traced.inputs, traced.result
    if not isinstance(result, fx.Node) or tensor_of(result).dtype != tensor_of(x).dtype:
        return None
    for name, form in _FORMS:
        bound = match(form, result)
        numbers = None if bound is None else numbers_of(bound)
        if bound is None or numbers is None:
            continue
        activation = activation_with(name, *numbers, gated="UP" in bound or "U" in bound)
        if "G" in bound:
            bound, halves = _of_one_layer(bound)
            activation = activation._replace(interleaved=halves == "every_other")
        if uncast(bound.get("X")) is x and _fit(x, result, bound):
            layers = [layer_of(bound, part) for part in ("GATE", "UP", "DOWN") if part in bound]
            named = [layer for layer in layers if layer is not None]
            if len(named) == len(layers):
                return _formula(activation, named)
    return None


def _formula(activation: Activation, layers: list[str]) -> MlpFormula | None:
    """Formula of a module's own layers, down last; None if a layer occurs twice."""
    *first, down = layers
    return MlpFormula(activation, tuple(first), down) if len({*layers}) == len(layers) else None


def _of_one_layer(bound: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Names bound by a formula of G and U, with the layer whose halves these are, and how the halves lie."""
    half = uncast(bound["G"])
    source = half.args[0] if half.target is ITEM else half
    whole: Any = source.args[0] if source.args else source
    linear, halves = linear_of(uncast(whole)), halves_of(whole, half, bound["U"])
    if linear is None or halves is None:
        return {}, None
    return bound | dict(zip(("X", "GATE", "GATE_BIAS"), linear, strict=True)), halves


def _fit(x: fx.Node, result: fx.Node, bound: dict[str, Any]) -> bool:
    """True if the matrices follow each other row by row."""
    rows = {part: tensor_of(uncast(bound[part])).shape for part in ("GATE", "UP", "DOWN") if part in bound}
    between, width = rows["GATE"]
    *outer, last = tensor_of(x).shape
    down, found = rows["DOWN"][0], rows["DOWN"][1] * (2 if "G" in bound else 1)
    same = rows.get("UP", rows["GATE"]) == rows["GATE"] and found == between
    return same and width == last and [*tensor_of(result).shape] == [*outer, down]


def mlp_forward(module: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
    """The forward of an MLP, whatever its argument is called."""
    x, *others = (*args, *named.values())
    formula: MlpFormula = module.__dict__[STATE].formula
    layers, down = [getattr(module, name) for name in formula.first], getattr(module, formula.down)
    if others or x.dim() not in RANKS or not join(*layers) or type(down) is not QuantizedLinear:
        return NotImplemented
    first = layers[0].__dict__[STATE].joined
    packed, scales, biases, gate_up_bias = first.weights
    down_packed, down_scales, down_biases, bias = down.weights()
    options = activation_arguments(tuple(formula.activation))
    options |= {"gate_up_bias": gate_up_bias, "down_bias": bias, "down_format": down.format.name}
    matrices = packed, scales, biases, down_packed, down_scales, down_biases
    compute = partial(_mlp_quantized, x, *matrices, format=first.format.name, **options)
    if not x.is_cpu:
        return compute()
    return with_decoded_weights(compute, module, *first.parts, down_packed, down_scales, down_biases)


def rewrite_mlp(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for an MLP of quantised layers, else None."""
    formula = mlp_formula(module)
    if formula is None:
        return None
    state_of(module).formula = formula
    join(*(getattr(module, name) for name in formula.first))
    return mlp_forward, [Done("_mlp_quantized", f"mlp_quantized ({formula.activation.activation})")]
