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


@dataclass(frozen=True)
class MlpFormula:
    """down(activation(gate(x)) * up(x)), without `up` down(activation(gate(x))): names of the children."""

    activation: str
    gate: str
    up: str | None
    down: str


def mlp_formula(program: Program) -> MlpFormula | None:
    module, result = program.module, Reader(program).result()
    for activation in POINTWISE:
        for form in (f"DOWN({activation}(GATE(X)) * UP(X))", f"DOWN({activation}(GATE(X)))"):
            bound = match(form, result)
            if bound is None or not is_argument(bound["X"]):
                continue
            layers = {name: bound[name] for name in ("GATE", "UP", "DOWN") if name in bound}
            if all(isinstance(child(layer, module), QuantizedLinear) for layer in layers.values()):
                up = layers["UP"].path if "UP" in layers else None
                return MlpFormula(activation, layers["GATE"].path, up, layers["DOWN"].path)
    return None


@called
def mlp(
    module: nn.Module, x: Tensor, residual: Tensor | None = None, norm: NormArguments | None = None
) -> Tensor:
    """The forward of an MLP behind a norm, plus the residual."""
    formula: MlpFormula = module.__dict__[RECORD].formula
    gate, down = getattr(module, formula.gate), getattr(module, formula.down)
    layers = (gate,) if formula.up is None else (gate, getattr(module, formula.up))
    if not join(*layers) or type(down) is not QuantizedLinear or is_observed(down):
        return add_terms(original_class(module).forward(module, normed(norm, x)), residual=residual)
    first, to = gate.__dict__[RECORD].joined, down.format
    form = first.format
    packed, scales, biases, bias = down.weights()
    options = {} if norm is None else dict(zip(_NORM, norm, strict=True))
    return ops.mlp_quantized(
        x, first.packed, first.scales, first.biases, packed, scales, biases,
        form.name, gate_up_bias=first.bias, down_bias=bias,
        activation=formula.activation, gated=formula.up is not None, residual=residual,
        down_format=to.name, **options,
    )  # fmt: skip


def fuse_mlp(program: Program) -> None:
    """Rewrites the forward of an MLP."""
    formula = mlp_formula(program)
    if formula is None or len(program.arguments.args) != 2:
        return
    record_of(program.module).formula = formula
    names = (formula.gate,) if formula.up is None else (formula.gate, formula.up)
    join(*(getattr(program.module, name) for name in names))
    add_option(program, RESIDUAL)
    add_option(program, NORM)
    replace_everything(program, f"mlp(self, X, {RESIDUAL}, {NORM})")
    program.rewrites.append(Done("mlp_quantized", f"mlp_quantized ({formula.activation})"))
