"""Caches of the tokens so far: their layers, the memory of these, cached prefixes."""
