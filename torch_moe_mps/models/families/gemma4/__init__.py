"""Gemma 4: a router that norms, multiplies, selects and scales, and layers that are scaled."""

from ...graphs.passes import Place
from ...graphs.passes.fused import add_norms
from ...graphs.passes.routing import hand_routing_over
from .. import Family
from .passes import gate_in_one, options_of_gate, scale_norm_sums

FAMILY = Family(
    passes=(Place(gate_in_one, before=hand_routing_over), Place(scale_norm_sums, after=add_norms)),
    introduced={gate_in_one: "moe_gate", scale_norm_sums: "fused_norm_add_scalar"},
    options_of=options_of_gate,
)
