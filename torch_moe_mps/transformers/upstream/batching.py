"""Continuous batching."""

from transformers.generation.continuous_batching import ContinuousBatchingManager

__all__ = ["ContinuousBatchingManager"]
