"""Qwen4: an indexer that chooses pools of keys; hyper-connections of low rank."""

from ...graphs.passes import INTRODUCED, PASSES
from ...graphs.passes.fused import add_in_operators, norm_sums
from ...modules.rules import MODULE_RULES
from .indexer import rewrite_qsa_indexer
from .passes import gated_norm_sums, streams_in_linears

MODULE_RULES.append(rewrite_qsa_indexer)
PASSES.insert(PASSES.index(add_in_operators), streams_in_linears)
PASSES.insert(PASSES.index(norm_sums), gated_norm_sums)
INTRODUCED[gated_norm_sums] = "fused_residual_norm"
