"""The forms that are recognised and replaced: a file for each, with what the rewritten code calls."""

from collections.abc import Callable

from torch import nn

from ...basics.report import Done
from ..functions import Rule
from .block_indexer import rewrite_block_indexer
from .compressed_attention import rewrite_compressed_attention
from .gated_norm import rewrite_gated_norm
from .hash_router import rewrite_hash_router
from .hyper_connection import rewrite_hyper_connection
from .indexer import rewrite_indexer
from .layer_norm import rewrite_layer_norm
from .linear_attention import convolution_in_place, delta_rule_in_place
from .mlp import rewrite_mlp
from .pooled_indexer import rewrite_pooled_indexer
from .recurrent_layers import rewrite_recurrent_layer
from .relative_bias import rewrite_relative_bias
from .rms_norm import rewrite_rms_norm
from .rope import rotation_in_place
from .rotary import rewrite_rotary
from .router import rewrite_router

# Modules that become one call of an operator, whatever their forward looks like. At most one rule applies.
MODULE_RULES: tuple[Callable[[nn.Module], tuple[Callable, list[Done]] | None], ...] = (
    rewrite_rotary,
    rewrite_rms_norm,
    rewrite_gated_norm,
    rewrite_layer_norm,
    rewrite_mlp,
    rewrite_recurrent_layer,
    rewrite_indexer,
    rewrite_block_indexer,
    rewrite_pooled_indexer,
    rewrite_relative_bias,
    rewrite_compressed_attention,
    rewrite_hyper_connection,
    rewrite_router,
    rewrite_hash_router,
)

# Functions that forwards call by name.
FUNCTION_RULES: tuple[Rule, ...] = (rotation_in_place, convolution_in_place, delta_rule_in_place)
