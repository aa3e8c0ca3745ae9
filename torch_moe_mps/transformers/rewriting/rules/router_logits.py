"""A router's matmul in float32, without copies of the token and of the router's weight in float32."""

import ast

import torch
import torch.nn.functional as F
from torch import Tensor

from ....ops._checks import ACTIVATION_DTYPES
from ..program.building import calls, helper, replace
from ..program.formulas import Node, Reader
from ..program.programs import Program

ops = torch.ops.moe_mps

MOST_TOKENS = 32  # for more a matmul on copies is faster


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x.float(), weight.float(), bias)."""
    is_few = x.dim() == 2 and x.shape[0] <= MOST_TOKENS
    dtypes = {x.dtype, weight.dtype}
    fits = dtypes != {torch.float32} and dtypes <= set(ACTIVATION_DTYPES) and x.device == weight.device
    if not is_few or not fits:
        return F.linear(x.float(), weight.float(), bias)
    return ops.router_logits(x, weight, bias)


def replace_router_logits(program: Program) -> None:
    """Rewrites linear(x.float(), self.weight.float()), however the casts are written."""
    for statement, call in list(calls(program)):
        if Reader(program).resolve(call.func) is not F.linear or len(call.args) not in (2, 3):
            continue
        x, weight = (_before_cast(program, argument, statement) for argument in call.args[:2])
        if x is None or weight is None or call.keywords or not _is_attribute(program, weight):
            continue
        replace(program, statement, call, helper("router_logits", x, weight, *call.args[2:]))
        program.rewrites.append("router_logits")


def _before_cast(program: Program, value: ast.expr, until: ast.stmt) -> ast.expr | None:
    """What a cast to float32 is applied to, directly in front of the call or under a name."""
    name = program.last_name(value)
    cast = program.follow(value)
    if name is not None:
        source = program.defined_by(name)
        if source is None or source.value is not cast or program.mutates_between(source, until):
            return None
    node = Reader(program).read(cast)
    if not isinstance(cast, ast.Call) or not isinstance(cast.func, ast.Attribute):
        return None
    return cast.func.value if (node.op, node.args[1:]) == ("cast", ("float32",)) else None


def _is_attribute(program: Program, weight: ast.expr) -> bool:
    node: Node = Reader(program).read(weight)
    return node.op == "attr"
