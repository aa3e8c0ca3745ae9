"""GLM-5.3-Flash: an indexer that chooses pools of keys."""

from .. import Family
from .indexer import rewrite_kpool_indexer
from .mask import masks_choices, take_choices

FAMILY = Family(rules=(rewrite_kpool_indexer,), layer_hook=take_choices, masks_choices=masks_choices)
