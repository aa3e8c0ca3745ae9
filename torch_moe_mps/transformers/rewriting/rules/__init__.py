"""The forms that are recognised and replaced: a file for each, with what the rewritten code calls.

A rule takes a program, rewrites what it recognises in it and adds a line to `program.rewrites`.
"""

from collections.abc import Callable

from torch import nn

from ..program.programs import Program
from .gated_delta import rewrite_gated_delta
from .gated_norm import rewrite_gated_norm
from .handover import hand_over_raw_results
from .linear import join_linears
from .mlp import fuse_mlp
from .moe_gate import USE_GATE
from .norms import FUSE_NORMS
from .residual import HAND_OVER_RESIDUAL, take_residual
from .rms_norm import CALL_NORM, replace_rms_norm
from .rope import replace_rope
from .rotary import rewrite_rotary
from .shared import fold_shared_experts

# Modules whose forward is replaced as a whole, whatever it looks like. At most one recognises a module.
MODULE_RULES: tuple[Callable[[nn.Module], tuple[Callable, str] | None], ...] = (
    rewrite_rotary,
    rewrite_gated_norm,
    rewrite_gated_delta,
)

# Forwards that one operator computes. True where it does: then nothing is left for other rules.
WHOLE_RULES: tuple[Callable[[Program], bool], ...] = (replace_rms_norm, fuse_mlp)

RULES: tuple[Callable[[Program], None], ...] = (
    fold_shared_experts,
    take_residual,  # the residual joins the call that fold_shared_experts has made
    hand_over_raw_results,  # a block with an option for the residual may return weights that nobody reads
    *FUSE_NORMS,
    *HAND_OVER_RESIDUAL,  # a sum that a norm follows belongs to the norm
    USE_GATE,  # reads which experts a router feeds, as the rules above have left their call
    replace_rope,
    join_linears,
    CALL_NORM,  # norms that no rule above has fused with something else
)
