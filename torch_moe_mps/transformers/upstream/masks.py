"""Functions that make masks."""

from transformers.masking_utils import blockwise_overlay, causal_mask_function, eager_mask

__all__ = ["blockwise_overlay", "causal_mask_function", "eager_mask"]
