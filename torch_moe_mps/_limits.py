"""Limits that several rooms share; this module imports nothing."""

LARGEST_CHUNK = 2048  # tokens of a prompt that are computed at once
