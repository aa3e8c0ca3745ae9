"""LongCat-Flash: experts of which some give back their input."""

from .. import Family
from .experts import experts

FAMILY = Family(rules=(experts,))
