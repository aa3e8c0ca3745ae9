"""Functions that make masks."""

from transformers.masking_utils import causal_mask_function, eager_mask

__all__ = ["causal_mask_function", "eager_mask"]
