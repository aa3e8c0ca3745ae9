"""JetMoE: experts of MLPs and of attention's projections."""

from .. import Family
from .experts import rewrite_attention_experts, rewrite_mlp_experts

FAMILY = Family(rules=(rewrite_mlp_experts, rewrite_attention_experts))
