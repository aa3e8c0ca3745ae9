"""Qwen4: an indexer that chooses pools of keys, the tables that it reads, and the mean over streams."""

from ...graphs.passes import PASSES
from ...graphs.passes.linears import join_linears
from ...graphs.passes.pointwise import join_elements
from ...modules.rules import MODULE_RULES
from .indexer import rewrite_qsa_indexer
from .passes import mean_in_elements, tables_of_slices

MODULE_RULES.append(rewrite_qsa_indexer)
PASSES.insert(PASSES.index(join_linears), tables_of_slices)
PASSES.insert(PASSES.index(join_elements) + 1, mean_in_elements)
