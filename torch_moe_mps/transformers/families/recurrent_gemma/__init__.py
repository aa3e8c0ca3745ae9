"""RecurrentGemma: layers of Griffin's RG-LRU, whose states are in the cache instead of in the modules."""

from .. import Family
from .layers import block, number_blocks

FAMILY = Family(rules=(block,), prepare=number_blocks)
