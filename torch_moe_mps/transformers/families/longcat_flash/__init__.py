"""LongCat-Flash: experts of which some give back their input."""

from .. import Family
from .experts import rewrite_experts

FAMILY = Family(rules=(rewrite_experts,))
