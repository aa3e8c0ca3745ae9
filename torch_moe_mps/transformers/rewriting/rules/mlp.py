"""Dense MLPs and shared experts with quantised weights.

Gate, up and activation are one dispatch, down is one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE
from ...experts import NormArguments, add_terms, is_observed, normed
from ...linears import QuantizedLinear
from ...report import Done
from ..program.building import add_option, replace_everything
from ..program.formulas import Reader, child, is_argument
from ..program.patterns import match
from ..program.programs import Program, original_class
from ..record import RECORD, record_of
from ..runtime import called
from .linear import join
from .options import NORM, RESIDUAL

ops = torch.ops.moe_mps

_NORM = ("norm_weight", "norm_eps", "norm_offset")  # NormArguments by the operator's names

# Of an MLP with its gate, and of one without.
_GATED = ("DOWN({0}(GATE(X)) * UP(X))", "DOWN({0}(chunk(BOTH, 2)[0]) * chunk(BOTH, 2)[1])")
_PLAIN = ("DOWN({0}(GATE(X)))",)


@dataclass(frozen=True)
class MlpFormula:
    """down(activation(gate(x)) * up(x)), which one layer may give, or down(activation(gate(x))).

    Attributes:
        first: the names of gate and up, or of the layer that is both.
    """

    activation: str
    first: tuple[str, ...]
    down: str
    gated: bool


def mlp_formula(program: Program) -> MlpFormula | None:
    module, result = program.module, Reader(program).result()
    for activation in POINTWISE:
        for form in (*_GATED, *_PLAIN):
            bound = match(form.format(activation), result)
            if bound is not None and "BOTH" in bound:
                bound = match("GATE(X)", bound["BOTH"], bound)
            if bound is None or not is_argument(bound["X"]):
                continue
            layers = [bound[name] for name in ("GATE", "UP", "DOWN") if name in bound]
            if all(isinstance(child(layer, module), QuantizedLinear) for layer in layers):
                *first, down = (layer.path for layer in layers)
                return MlpFormula(activation, tuple(first), down, form in _GATED)
    return None


@called
def mlp(
    module: nn.Module, x: Tensor, residual: Tensor | None = None, norm: NormArguments | None = None
) -> Tensor:
    """The forward of an MLP behind a norm, plus the residual."""
    formula: MlpFormula = module.__dict__[RECORD].formula
    layers, down = [getattr(module, name) for name in formula.first], getattr(module, formula.down)
    if not join(*layers) or type(down) is not QuantizedLinear or is_observed(down):
        return add_terms(original_class(module).forward(module, normed(norm, x)), residual=residual)
    first, to = layers[0].__dict__[RECORD].joined, down.format
    form = first.format
    packed, scales, biases, bias = down.weights()
    options = {} if norm is None else dict(zip(_NORM, norm, strict=True))
    return ops.mlp_quantized(
        x, first.packed, first.scales, first.biases, packed, scales, biases,
        form.name, gate_up_bias=first.bias, down_bias=bias,
        activation=formula.activation, gated=formula.gated, residual=residual,
        down_format=to.name, **options,
    )  # fmt: skip


def fuse_mlp(program: Program) -> None:
    """Rewrites the forward of an MLP."""
    formula = mlp_formula(program)
    if formula is None or len(program.arguments.args) != 2:
        return
    record_of(program.module).formula = formula
    join(*(getattr(program.module, name) for name in formula.first))
    add_option(program, RESIDUAL)
    add_option(program, NORM)
    replace_everything(program, f"mlp(self, X, {RESIDUAL}, {NORM})")
    program.rewrites.append(Done("mlp_quantized", f"mlp_quantized ({formula.activation})"))
