"""ZAYA: two convolutions mix queries and keys, and half of a value is the one of the token before."""

from .. import Family
from .projection import projection

FAMILY = Family(rules=(projection,))
