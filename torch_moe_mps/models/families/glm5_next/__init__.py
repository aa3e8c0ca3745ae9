"""GLM-5.3-Flash: an indexer that chooses pools of keys."""

from .. import Family
from .indexer import rewrite_kpool_indexer
from .mask import METHOD, masks_choices, taking_choices

FAMILY = Family(rules=(rewrite_kpool_indexer,), methods={METHOD: taking_choices}, masks_choices=masks_choices)
