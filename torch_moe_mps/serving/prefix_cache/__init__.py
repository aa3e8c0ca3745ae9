"""Cached prefixes in memory and on disk."""
