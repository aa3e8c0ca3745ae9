"""Speculative decoding: drafters, verification, and the names of built-in drafters."""

LOOKUP, MTP = "lookup", "mtp"
