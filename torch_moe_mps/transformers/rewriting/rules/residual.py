"""Residual sums behind experts and MLPs: the last operator of the block adds the residual."""

import ast

from torch import Tensor, nn

from ...experts import is_observed
from ..program.building import add_option, helper
from ..program.programs import Program
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .mlp import RESIDUAL
from .shared import experts_call, is_with_shared


@called
def with_residual(block: nn.Module, residual: Tensor, x: Tensor) -> Tensor | tuple:
    """block(x) with the residual added to its result, to the first one if there are several."""
    if RESIDUAL in vars(type(block)) and not is_observed(block) and residual.shape == x.shape:
        return block(x, **{RESIDUAL: residual})
    return add_to_first(residual, block(x))


def add_to_first(residual: Tensor | None, out: Tensor | tuple) -> Tensor | tuple:
    if residual is None:
        return out
    return (residual + out[0], *out[1:]) if isinstance(out, tuple) else residual + out


def take_residual(program: Program) -> None:
    """Gives a block that returns the output of its experts an option: a residual that is added to it."""
    result = program.follow(program.result)
    first = result.elts[0] if isinstance(result, ast.Tuple) and result.elts else result
    call = experts_call(program, first, or_with_shared=True)
    if call is None or call.keywords:
        return
    arguments = call.args if is_with_shared(call) else [call.func, *call.args]
    new = helper("experts_with_shared", *arguments, residual=ast.Name(RESIDUAL, ast.Load()))
    call.func, call.args, call.keywords = new.func, new.args, new.keywords
    add_option(program, RESIDUAL)
    program.rewrites.append("residual in moe_experts")


def _takes_residual(match: Match) -> str | None:
    takes = RESIDUAL in vars(type(match.module("BLOCK")))
    return f"residual in {match.child('BLOCK')}" if takes else None


HAND_OVER_RESIDUAL = (
    Rewrite("S = R + BLOCK(X)", "S = with_residual(BLOCK, R, X)", where=_takes_residual),
    Rewrite("S = R + BLOCK(X)[0]", "S = with_residual(BLOCK, R, X)[0]", where=_takes_residual),
    Rewrite("S = R + first_of(BLOCK(X))", "S = first_of(with_residual(BLOCK, R, X))", where=_takes_residual),
)
