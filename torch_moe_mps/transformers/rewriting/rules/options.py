"""The extra arguments that a rewritten forward passes to the rewritten forwards of the blocks it calls.

RESIDUAL: what a block adds to its result, or to the first of several. NORM: how it norms its input,
as arguments of operators. RAW: a router may return weights and ids without casts. GATE: it may also return
None in the place of the first result.
"""

from collections.abc import Callable

from torch import nn

from ...experts import is_observed
from ..program.programs import forward_given
from ..program.reads import holds
from ..record import NOTHING, RECORD

RESIDUAL, NORM, RAW, GATE = "moe_mps_residual", "moe_mps_norm", "moe_mps_raw", "moe_mps_gate"


def takes(block: nn.Module, option: str) -> bool:
    """Whether the forward that a block was given has an option."""
    return option in forward_given(block)[1]


def forward_of(block: nn.Module) -> tuple[Callable | None, frozenset[str]]:
    """The forward that a block was given, and its options; None if a call of the block does more than that.

    The calling forward has seen to gradients, autocast and float64 already.
    """
    own = block.__dict__
    record = own.get(RECORD, NOTHING)
    if own["training"] or own.get("_compiled_call_impl") is not None or is_observed(block):
        return None, frozenset()
    if record.reads is None or (record.reads and not holds(block)):
        return None, frozenset()
    return forward_given(block)
