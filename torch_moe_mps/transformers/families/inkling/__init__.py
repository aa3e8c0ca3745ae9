"""Inkling: attention with a bias of relative positions, convolutions with their input, routers in float32."""

from ...graphs.passes import Place
from ...graphs.passes.fused import norm_in_linear_attention
from ...graphs.passes.routing import hand_routing_over
from .. import Family
from .passes import input_in_convolution, logits_in_float32
from .relative_bias import needs_ours, rewrite_relative_bias, take_biases

FAMILY = Family(
    rules=(rewrite_relative_bias,),
    layer_hook=take_biases,
    needs_our_kernel=needs_ours,
    passes=(
        Place(input_in_convolution, after=norm_in_linear_attention),
        Place(logits_in_float32, before=hand_routing_over),
    ),
    introduced={logits_in_float32: "router_logits"},
)
