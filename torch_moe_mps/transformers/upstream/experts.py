"""Implementations of experts."""

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["ALL_EXPERTS_FUNCTIONS"]
