"""The forms that are recognised and replaced: a file for each, with what the rewritten code calls."""

from collections.abc import Callable
from typing import Any

from ...basics.report import Done
from ..functions import Rule
from .gated_delta_rule import convolution_in_place, delta_rule_in_place
from .hyper_connection import rewrite_hyper_connection
from .mlp import rewrite_mlp
from .norms import rewrite_norm
from .recurrent_layers import lightning, mamba, selective, with_channels
from .rope import rotation_in_place
from .rotary import rewrite_rotary
from .routed_inputs import rewrite_routed_inputs
from .router import rewrite_router

ModuleRule = Callable[[Any], tuple[Callable, list[Done]] | None]
# Modules that become one call of an operator, whatever their forward looks like. At most one rule
# applies.
MODULE_RULES: list[ModuleRule] = [
    rewrite_rotary,
    rewrite_norm,
    rewrite_mlp,
    with_channels,
    mamba,
    selective,
    lightning,
    rewrite_hyper_connection,
    rewrite_router,
    rewrite_routed_inputs,
]

# Functions that forwards call by name.
FUNCTION_RULES: tuple[Rule, ...] = (rotation_in_place, convolution_in_place, delta_rule_in_place)
