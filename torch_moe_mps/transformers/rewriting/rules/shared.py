"""Shared experts: their output is added in the sum over the routed experts instead of after it."""

import ast

from torch import Tensor, nn

from ...experts import NormArguments, add_terms, experts_forward, may_be_fused, normed
from ...interface import Experts, is_experts
from ...report import Done
from ..program.formulas import Reader, child
from ..program.patterns import match as matched
from ..program.rewrites import Match, Rewrite
from ..runtime import called


@called
def experts_with_shared(
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
    moe_mps_norm: NormArguments | None = None,
) -> Tensor:
    """experts(norm(hidden_states), ...) + shared_out, times sigmoid(shared_gate) if given, + residual.

    What the operators add is rounded once.
    """
    dtype, shape = hidden_states.dtype, hidden_states.shape
    if shared_out is not None and shared_out.shape != shape:
        shared_out = shared_out.reshape(shape)
    is_same = (residual is None or residual.dtype is dtype) and (
        shared_out is None or shared_out.dtype is dtype
    )
    if is_same and may_be_fused(experts):
        gate = None if shared_gate is None else shared_gate.reshape(-1)
        # What transformers' dispatch to implementations would call, without it.
        return experts_forward(
            experts, hidden_states, top_k_index, top_k_weights, shared_gate=gate, shared_out=shared_out,
            residual=residual, norm=moe_mps_norm,
        )  # fmt: skip
    hidden_states = normed(moe_mps_norm, hidden_states)
    return add_terms(experts(hidden_states, top_k_index, top_k_weights), shared_gate, shared_out, residual)


def _is_shared(match: Match) -> Done | None:
    """Whether the sum is that of experts; OUT and GATE are the other summand, with its gate if it has one.

    A gate is a linear layer with one value a token.
    """
    if not is_experts(match.module("EXPERTS")):
        return None
    program = match.program
    bound = matched("sigmoid(GATE(X)) * OUT", Reader(program).read(match.values["Y"])) or {}
    gate = child(bound.get("GATE"), program.module)
    gated = isinstance(gate, nn.Linear) and gate.out_features == 1 and bound["OUT"].source is not None
    match.values["OUT"] = bound["OUT"].source if gated else match.values["Y"]
    match.values["LOGIT"] = bound["GATE(X)"].source if gated else ast.Constant(None)
    return Done("moe_experts", f"moe_experts adds the shared expert{' and its gate' if gated else ''}")


# The sum has the shape in which the experts' output was added.
FOLD_SHARED_EXPERTS = Rewrite(
    "S = shaped(EXPERTS(X, IDS, WEIGHTS)) + Y",
    "S = shaped(experts_with_shared(EXPERTS, X, IDS, WEIGHTS, OUT, LOGIT))",
    where=_is_shared,
)
