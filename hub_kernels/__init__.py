"""Kernels of torch-moe-mps for transformers' kernel mapping on mps, which has some for other devices only."""

from . import layers

__all__ = ["layers"]
