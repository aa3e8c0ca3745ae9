"""Qwen4: an indexer that chooses pools of keys, and the tables of the whole context that it reads."""

from ...graphs.passes import PASSES
from ...graphs.passes.linears import join_linears
from ...modules.rules import MODULE_RULES
from .indexer import rewrite_qsa_indexer
from .passes import tables_of_slices

MODULE_RULES.append(rewrite_qsa_indexer)
PASSES.insert(PASSES.index(join_linears), tables_of_slices)
