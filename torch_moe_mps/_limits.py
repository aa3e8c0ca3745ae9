"""Limits that several rooms share; this module imports nothing."""

MOST_TOKENS = 8  # new ones of a sequence in a decode step; a call with more is a prompt
LARGEST_CHUNK = 2048  # tokens of a prompt that are computed at once
