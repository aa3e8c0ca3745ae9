"""JetMoE: experts of MLPs and of attention's projections, and heads of keys that are repeated."""

from ...graphs.passes import Place
from ...graphs.passes.attention import turn_in_attention
from .. import Family
from .experts import recognise_attention_experts, recognise_mlp_experts
from .passes import repeats_as_tokens

FAMILY = Family(
    recognisers=(recognise_mlp_experts, recognise_attention_experts),
    passes=(Place(repeats_as_tokens, after=turn_in_attention),),
)
