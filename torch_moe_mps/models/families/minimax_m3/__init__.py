"""MiniMax M3: an indexer that chooses blocks of keys."""

from .. import Family
from .cache import growing_layer
from .indexer import rewrite_block_indexer

FAMILY = Family(rules=(rewrite_block_indexer,), growing_class=growing_layer)
