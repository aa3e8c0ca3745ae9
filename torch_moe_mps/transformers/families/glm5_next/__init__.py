"""GLM-5.3-Flash: an indexer that chooses pools of keys."""

from ...attention.attention import OF_FAMILIES
from ...modules.rules import MODULE_RULES
from .indexer import rewrite_kpool_indexer
from .mask import take_choices

OF_FAMILIES.append(take_choices)
MODULE_RULES.append(rewrite_kpool_indexer)
