"""Qwen4: an indexer that chooses pools of keys."""

from ...modules.rules import MODULE_RULES
from .indexer import rewrite_qsa_indexer

MODULE_RULES.append(rewrite_qsa_indexer)
