"""Quantised checkpoints: which weights, how they are read, quantised, saved and loaded."""

# First: any import of a room of transformers/ registers it as a whole, which reads files of this folder.
from ..transformers import upstream as _upstream  # noqa: F401
