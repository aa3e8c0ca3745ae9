"""Gemma 4: a router that norms, multiplies, selects and scales, layers that are scaled, and keys for MLX."""

from ...graphs.passes import INTRODUCED, PASSES
from ...graphs.passes.fused import add_norms
from ...graphs.passes.routing import OPTIONS_OF, hand_routing_over
from .. import MLX_KEYS, MLX_NAMES
from .keys import NEEDED, older_keys
from .passes import gate_in_one, options_of_gate, scale_norm_sums

PASSES.insert(PASSES.index(hand_routing_over), gate_in_one)
PASSES.insert(PASSES.index(add_norms) + 1, scale_norm_sums)
INTRODUCED |= {gate_in_one: "moe_gate", scale_norm_sums: "fused_norm_add_scalar"}
OPTIONS_OF.append(options_of_gate)
MLX_KEYS["gemma4_text"] = (NEEDED, older_keys)
MLX_NAMES["gemma4_text"] = {"experts": "experts.switch_glu"}
