"""Inkling: attention with a bias of relative positions."""

from ...attention.relative_bias import MAKERS
from ...modules.rules import MODULE_RULES
from .relative_bias import makes_relative_bias, rewrite_relative_bias

MAKERS.append(makes_relative_bias)
MODULE_RULES.append(rewrite_relative_bias)
