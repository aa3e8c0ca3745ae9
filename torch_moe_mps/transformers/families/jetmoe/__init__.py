"""JetMoe: experts of MLPs and of attention, whose eager code asks the GPU how many tokens each has."""

from .. import Family
from .layers import block, mark_blocks, rewrite_part

FAMILY = Family(rules=(rewrite_part, block), prepare=mark_blocks)
