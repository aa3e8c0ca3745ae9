"""JetMoE: experts of MLPs and of attention's projections."""

from .. import Family
from .experts import recognise_attention_experts, recognise_mlp_experts

FAMILY = Family(recognisers=(recognise_mlp_experts, recognise_attention_experts))
