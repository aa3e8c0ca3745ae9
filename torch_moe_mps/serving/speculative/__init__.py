"""Tokens that are drafted, and verified together by one call of the model; sources that have a name."""

LOOKUP, MTP = "lookup", "mtp"
