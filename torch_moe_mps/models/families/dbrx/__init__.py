"""DBRX: experts whose matrices lie in one below the other, and weights that are divided by their norm."""

from .. import Family
from .experts import recognise_experts
from .routing import rewrite_routing

FAMILY = Family(
    rules=(rewrite_routing,),
    recognisers=(recognise_experts,),
)
