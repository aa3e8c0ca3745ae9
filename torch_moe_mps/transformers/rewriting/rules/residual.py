"""Residual sums behind experts and MLPs: the last operator of the block adds the residual."""

from torch import Tensor, nn

from ...experts import is_observed
from ...interface import is_experts
from ..program.building import add_option
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .mlp import RESIDUAL


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


def _is_of_experts(match: Match) -> str | None:
    if "EXPERTS" in match.values and not is_experts(match.module("EXPERTS")):
        return None
    add_option(match.program, RESIDUAL)
    return "residual in moe_experts"


# A block that returns the output of its experts gets an option: a residual that is added to it.
TAKE_RESIDUAL = (
    Rewrite(
        "return shaped(experts_with_shared(*ARGS))",
        f"return shaped(experts_with_shared(*ARGS, residual={RESIDUAL}))",
        where=_is_of_experts,
    ),
    Rewrite(
        "return shaped(EXPERTS(X, IDS, WEIGHTS))",
        f"return shaped(experts_with_shared(EXPERTS, X, IDS, WEIGHTS, residual={RESIDUAL}))",
        where=_is_of_experts,
    ),
)


def _takes_residual(match: Match) -> str | None:
    takes = RESIDUAL in vars(type(match.module("BLOCK")))
    return f"residual in {match.child('BLOCK')}" if takes else None


HAND_OVER_RESIDUAL = (
    Rewrite("S = R + BLOCK(X)", "S = with_residual(BLOCK, R, X)", where=_takes_residual),
    Rewrite("S = R + BLOCK(X)[0]", "S = with_residual(BLOCK, R, X)[0]", where=_takes_residual),
    Rewrite("S = R + first_of(BLOCK(X))", "S = first_of(with_residual(BLOCK, R, X))", where=_takes_residual),
)
