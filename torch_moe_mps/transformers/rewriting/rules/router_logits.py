"""A router's matmul in float32, without copies of the token and of the router's weight in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ....ops._checks import ACTIVATION_DTYPES
from ...report import Done
from ..program.formulas import Reader
from ..program.programs import Program
from ..program.rewrites import Match, Rewrite
from ..runtime import called

ops = torch.ops.moe_mps


@called
def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x.float(), weight.float(), bias)."""
    if not _fits(x, weight) or x.dtype == weight.dtype == torch.float32:
        return F.linear(x.float(), weight.float(), bias)
    return ops.router_logits(x, weight, bias)


def _fits(x: Tensor, weight: Tensor) -> bool:
    dtypes = x.dtype in ACTIVATION_DTYPES and weight.dtype in ACTIVATION_DTYPES
    return x.dim() == 2 and dtypes and x.device == weight.device


def _of_an_attribute(match: Match) -> Done | None:
    """Whether the weight is the module's: what else is cast may be changed in place."""
    is_attribute = Reader(match.program).read(match.values["WEIGHT"]).op == "attr"
    return Done("router_logits") if is_attribute else None


REPLACE_ROUTER_LOGITS = Rewrite(
    "torch.nn.functional.linear(float32(X), float32(WEIGHT), *BIAS)",
    "router_logits(X, WEIGHT, *BIAS)",
    where=_of_an_attribute,
)


def compute_logits_by_operator(program: Program) -> None:
    """Rewrites the matmul of a router whose selection is an operator."""
    if any(done.operator == "moe_router" for done in program.rewrites):
        REPLACE_ROUTER_LOGITS(program)
