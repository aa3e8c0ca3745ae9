"""LongCat-Flash: some experts return their input."""

from .. import Family
from .experts import experts

FAMILY = Family(rules=(experts,))
