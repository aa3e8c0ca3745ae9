"""Dense MLPs and shared experts with quantised weights.

Gate, up and activation are one dispatch, down is one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE, Activation
from ...experts import GATES, activation_arguments, is_observed, with_numbers
from ...linears import QuantizedLinear
from ...report import Done
from ..program.building import replace_everything
from ..program.formulas import Reader, child, is_argument
from ..program.patterns import match
from ..program.programs import Program
from ..record import RECORD, original_class, record_of
from ..runtime import called
from .linear import join

ops = torch.ops.moe_mps

# The gate and the other half: of two layers, and of one.
_HALVES = (("GATE(X)", "UP(X)"), ("chunk(GATE(X), 2)[0]", "chunk(GATE(X), 2)[1]"))
_FORMS = [
    *((name, form.replace("G", g).replace("U", u)) for name, form in GATES.items() for g, u in _HALVES),
    *((name, f"{name}(GATE(X))") for name in POINTWISE),  # without a gate
]


@dataclass(frozen=True)
class MlpFormula:
    """down(activation(gate(x), up(x))), which one layer may give, or down(activation(gate(x))).

    Attributes:
        first: the names of gate and up, or of the layer that is both.
    """

    activation: Activation
    first: tuple[str, ...]
    down: str


def mlp_formula(program: Program) -> MlpFormula | None:
    module, result = program.module, Reader(program).result()
    for name, form in _FORMS:
        bound = match(f"DOWN({form})", result)
        activation = None if bound is None else with_numbers(module, name, False, bound)
        if bound is None or activation is None or not is_argument(bound["X"]):
            continue
        layers = [bound[part] for part in ("GATE", "UP", "DOWN") if part in bound]
        if all(isinstance(child(layer, module), QuantizedLinear) for layer in layers):
            *first, down = (layer.path for layer in layers)
            is_gated = form != f"{name}(GATE(X))"
            return MlpFormula(activation._replace(gated=is_gated), tuple(first), down)
    return None


@called
def mlp(module: nn.Module, x: Tensor) -> Tensor:
    """The forward of an MLP."""
    formula: MlpFormula = module.__dict__[RECORD].formula
    layers, down = [getattr(module, name) for name in formula.first], getattr(module, formula.down)
    if not join(*layers) or type(down) is not QuantizedLinear or is_observed(down):
        out: Tensor = original_class(module).forward(module, x)
        return out
    first, to = layers[0].__dict__[RECORD].joined, down.format
    form = first.format
    packed, scales, biases, bias = down.weights()
    options = activation_arguments(tuple(formula.activation))
    return ops.mlp_quantized(
        x, first.packed, first.scales, first.biases, packed, scales, biases,
        form.name, gate_up_bias=first.bias, down_bias=bias, down_format=to.name, **options,
    )  # fmt: skip


def fuse_mlp(program: Program) -> None:
    """Rewrites the forward of an MLP."""
    formula = mlp_formula(program)
    if formula is None or len(program.arguments.args) != 2:
        return
    record_of(program.module).formula = formula
    join(*(getattr(program.module, name) for name in formula.first))
    replace_everything(program, "mlp(self, X)")
    program.rewrites.append(Done("mlp_quantized", f"mlp_quantized ({formula.activation.activation})"))
