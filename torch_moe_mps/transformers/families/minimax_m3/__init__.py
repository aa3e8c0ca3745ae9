"""MiniMax M3: an indexer that chooses blocks of keys."""

from ...caches.layers import OF_FAMILIES
from ...modules.rules import MODULE_RULES
from .cache import growing_layer
from .indexer import rewrite_block_indexer

OF_FAMILIES.append(growing_layer)
MODULE_RULES.append(rewrite_block_indexer)
