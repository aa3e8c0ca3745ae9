"""Dense MLPs and shared experts with quantised weights.

Gate, up and activation are one dispatch, down is one.
"""

import ast
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....ops._activations import POINTWISE
from ...experts import add_terms, is_observed
from ...linears import QuantizedLinear
from ..program.building import add_option, helper, replace_everything
from ..program.formulas import Node, Reader
from ..program.patterns import match
from ..program.programs import Program, original_class
from ..record import RECORD, record_of
from ..runtime import called
from .linear import join

ops = torch.ops.moe_mps

# The argument with which a layer hands over what it would add to the result.
RESIDUAL = "moe_mps_residual"


@dataclass(frozen=True)
class MlpFormula:
    """down(activation(gate(x)) * up(x)), without `up` down(activation(gate(x))): names of the children."""

    activation: str
    gate: str
    up: str | None
    down: str


def _child(node: Node, module: nn.Module) -> tuple[str, Node] | None:
    """(name, argument) of a call of a quantised linear layer."""
    node = node.peel()
    if node.op != "module" or len(node.args) != 2:
        return None
    name = node.args[0].removeprefix("self.")
    return (name, node.args[1]) if isinstance(module._modules.get(name), QuantizedLinear) else None


def mlp_formula(program: Program) -> MlpFormula | None:
    module = program.module
    down = _child(Reader(program).result(), module)
    if down is None:
        return None
    for activation in POINTWISE:
        for form in (f"{activation}(G) * U", f"{activation}(G)"):
            bound = match(form, down[1]) or {}
            found = {name: _child(node, module) for name, node in bound.items()}
            halves = {
                name: half[0] for name, half in found.items() if half is not None and _is_input(half[1])
            }
            if halves and len(halves) == len(found):
                return MlpFormula(activation, halves["G"], halves.get("U"), down[0])
    return None


def _is_input(node: Node) -> bool:
    return node.op == "opaque" and isinstance(node.source, ast.Name)


@called
def mlp(module: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The forward of an MLP, plus the residual."""
    formula: MlpFormula = module.__dict__[RECORD].formula
    gate, down = getattr(module, formula.gate), getattr(module, formula.down)
    layers = (gate,) if formula.up is None else (gate, getattr(module, formula.up))
    if not join(*layers) or type(down) is not QuantizedLinear or is_observed(down):
        return add_terms(original_class(module).forward(module, x), residual=residual)
    first, to = gate.__dict__[RECORD].joined, down.format
    form = first.format
    packed, scales, biases, bias = down.weights()
    return ops.mlp_quantized(
        x, first.packed, first.scales, first.biases, packed, scales, biases,
        form.bits, form.group_size, form.mode, gate_up_bias=first.bias, down_bias=bias,
        activation=formula.activation, gated=formula.up is not None, residual=residual,
        down_bits=to.bits, down_group_size=to.group_size, down_mode=to.mode,
    )  # fmt: skip


def fuse_mlp(program: Program) -> bool:
    """Rewrites the forward of an MLP."""
    formula = mlp_formula(program)
    if formula is None or len(program.arguments.args) != 2:
        return False
    record_of(program.module).formula = formula
    names = (formula.gate,) if formula.up is None else (formula.gate, formula.up)
    join(*(getattr(program.module, name) for name in names))
    x = ast.Name(program.arguments.args[1].arg, ast.Load())
    add_option(program, RESIDUAL)
    replace_everything(
        program, helper("mlp", ast.Name("self", ast.Load()), x, ast.Name(RESIDUAL, ast.Load()))
    )
    program.rewrites.append(f"mlp_quantized ({formula.activation})")
    return True
