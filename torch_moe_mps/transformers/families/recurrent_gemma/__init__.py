"""RecurrentGemma: layers of Griffin's RG-LRU, whose states are in the cache instead of in the modules."""

from .. import Family
from .layers import number_blocks, rewrite_recurrent_block

FAMILY = Family(rules=(rewrite_recurrent_block,), prepare=number_blocks)
