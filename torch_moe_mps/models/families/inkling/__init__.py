"""Inkling: a router that computes its logits in float32."""

from ...graphs.passes import Place
from ...graphs.passes.attention import turn_in_attention
from .. import Family
from .passes import logits_in_float32

FAMILY = Family(
    passes=(Place(logits_in_float32, after=turn_in_attention),),
    introduced={logits_in_float32: "router_logits"},
)
