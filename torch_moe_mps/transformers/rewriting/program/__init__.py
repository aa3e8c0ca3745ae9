"""Reads a forward as a straight-line program, matches formulas in it, and rewrites it."""
