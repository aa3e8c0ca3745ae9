"""The operator `attention` in place of a model's own: masks, latents, keys that are chosen."""

from ..modules.rules import MODULE_RULES
from .indexer import rewrite_indexer

MODULE_RULES.append(rewrite_indexer)
