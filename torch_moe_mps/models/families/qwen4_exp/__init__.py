"""Qwen4: an indexer that chooses pools of keys, the tables that it reads, and the mean over streams."""

from ...graphs.passes import Place
from ...graphs.passes.linears import join_linears
from ...graphs.passes.pointwise import join_elements
from .. import Family
from .indexer import masks_choices, rewrite_qsa_indexer
from .passes import mean_in_elements, tables_of_slices

FAMILY = Family(
    rules=(rewrite_qsa_indexer,),
    masks_choices=masks_choices,
    passes=(Place(tables_of_slices, before=join_linears), Place(mean_in_elements, after=join_elements)),
)
