"""Quantised layers with what their module does to the result: an activation, a residual stream, a LayerNorm.

    act(linear(x)),  linear(x) + residual,  layer_norm(linear(x) + residual)

Layers of BERT and its relatives are built of these three. The linear layer, its bias and what follows it are
one dispatch; the LayerNorm is another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ....ops.linear import linear_quantized
from ...basics.report import Done
from ...basics.state import STATE, original_class, state_of
from ...graphs.nodes import tensor_of
from ...graphs.patterns import Bound, match, uncast
from ..experts import ACTIVATION_FORMS, is_observed
from ..linears import QuantizedLinear
from ..traced import Input, Sizes, Traced, everywhere, names_of_inputs, remembered, trace
from .linear import layer_of

_LINEAR = "linear(X, LAYER, LAYER_BIAS)"
_NORMED = f"item(native_layer_norm({_LINEAR} + RESIDUAL, SHAPE, NORM, NORM_BIAS, EPS), 0)"
# (activation, formula), the longest first.
_FORMS: list[tuple[str | None, str]] = [
    (None, _NORMED),
    (None, f"{_LINEAR} + RESIDUAL"),
    *((name, form.format(G=_LINEAR)) for name, form in ACTIVATION_FORMS if "{U}" not in form),
]


class Projection(NamedTuple):
    """norm(activation(layer(x)) + residual), without the parts that are None.

    Attributes:
        layer, norm: names of children.
        inputs: names of the forward's arguments, in their order.
        x: the place of the layer's input among them; the residual is the other one.
        others: names of the other children that run, as a dropout.
    """

    layer: str
    inputs: tuple[str, ...]
    x: int
    activation: str | None = None
    norm: str | None = None
    others: tuple[str, ...] = ()


@remembered
def projection_of(module: nn.Module) -> Projection | None:
    """How a module with one quantised layer computes a projection, None if it is something else."""
    layers = [name for name, child in module._modules.items() if type(child) is QuantizedLinear]
    names = names_of_inputs(module)
    if len(layers) != 1 or names is None or len(names) > 2:
        return None
    (layer,) = layers
    own: Any = module._modules[layer]
    for x in range(len(names)):
        widths = [own.columns if place == x else own.rows for place in range(len(names))]

        def ask(sizes: Sizes, dtype: torch.dtype, x: int = x, widths: list = widths) -> Projection | None:
            traced = trace(module, *(Input((*sizes, width), dtype) for width in widths), weights=dtype)
            return None if traced is None else _read(module, Projection(layer, names, x), traced)

        formula = everywhere(ask)
        if formula is not None:
            return formula
    return None


def _read(module: nn.Module, start: Projection, traced: Traced) -> Projection | None:
    result, x = traced.result, traced.inputs[start.x]
    if not isinstance(result, fx.Node) or tensor_of(result).dtype != tensor_of(x).dtype:
        return None
    rows: Any = module._modules[start.layer]
    if [*tensor_of(result).shape] != [*tensor_of(x).shape[:-1], rows.rows]:
        return None
    for activation, form in _FORMS:
        bound = match(form, result)
        if bound is None or not _reads(bound, start, traced):
            continue
        norm = _norm(module, bound)
        if "NORM" in bound and norm is None:
            continue
        others = tuple(path for path in traced.called if path != norm)
        if not any("." in path for path in others):
            return start._replace(activation=activation, norm=norm, others=others)
    return None


def _reads(bound: Bound, start: Projection, traced: Traced) -> bool:
    """Whether a formula is one of the module's own layer and of all its inputs."""
    residual = [node for place, node in enumerate(traced.inputs) if place != start.x]
    read = [uncast(bound["RESIDUAL"])] if "RESIDUAL" in bound else []
    is_own = layer_of(bound, "LAYER") == start.layer
    return is_own and uncast(bound["X"]) is traced.inputs[start.x] and read == residual


def _norm(module: nn.Module, bound: Bound) -> str | None:
    """The name of the child that is the norm of a formula."""
    name = layer_of(bound, "NORM") if "NORM" in bound else None
    child = None if name is None else module._modules.get(name)
    if child is None or original_class(child) is not nn.LayerNorm or bound["EPS"] != child.eps:
        return None
    return name if (bound["NORM_BIAS"] is None) == (child.bias is None) else None


def _of_kind(tensor: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if tensor is None else ((*tensor.shape,), tensor.dtype)


def projection_forward(module: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
    """The forward of a projection, whatever its arguments are called."""
    formula: Projection = module.__dict__[STATE].formula
    inputs: Any = (*args, *map(named.get, formula.inputs[len(args) :]))
    layer, *others = (getattr(module, name) for name in (formula.layer, *formula.others))
    x, *residual = inputs if formula.x == 0 else inputs[::-1]
    fits = type(layer) is QuantizedLinear and not is_observed(layer, *others)
    fits = fits and len(args) + len(named) == len(formula.inputs)
    if not fits or any(_of_kind(item) != ((*x.shape[:-1], layer.rows), x.dtype) for item in residual):
        return NotImplemented
    packed, scales, biases, bias = layer.weights()
    out: Tensor = linear_quantized(
        x,
        packed,
        scales,
        biases,
        layer.format.name,
        bias,
        next(iter(residual), None),
        activation=formula.activation,
    )
    return out if formula.norm is None else getattr(module, formula.norm)(out)


def rewrite_projection(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a quantised layer and its module's work on the result, else None."""
    formula = projection_of(module)
    if formula is None:
        return None
    state_of(module).formula = formula
    what = formula.activation or "residual"
    return projection_forward, [Done("linear_quantized", f"linear_quantized ({what})")]
