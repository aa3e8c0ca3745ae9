"""DBRX: experts whose matrices lie in one below the other, and weights that are divided by their norm."""

from .. import Family, GgufArchitecture
from .experts import recognise_experts
from .gguf import NAME, config, conversions
from .routing import rewrite_routing

FAMILY = Family(
    rules=(rewrite_routing,),
    recognisers=(recognise_experts,),
    gguf={NAME: GgufArchitecture(config, conversions)},
)
