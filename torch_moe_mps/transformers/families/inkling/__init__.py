"""Inkling: attention with a bias of relative positions, convolutions with their input, routers in float32."""

from ...attention.attention import NEEDS, OF_FAMILIES
from ...graphs.passes import INTRODUCED, PASSES
from ...graphs.passes.fused import norm_in_linear_attention
from ...graphs.passes.routing import hand_routing_over
from ...modules.rules import MODULE_RULES
from .passes import input_in_convolution, logits_in_float32
from .relative_bias import needs_ours, rewrite_relative_bias, take_biases

NEEDS.append(needs_ours)
OF_FAMILIES.append(take_biases)
MODULE_RULES.append(rewrite_relative_bias)
PASSES.insert(PASSES.index(norm_in_linear_attention) + 1, input_in_convolution)
PASSES.insert(PASSES.index(hand_routing_over), logits_in_float32)
INTRODUCED[logits_in_float32] = "router_logits"
