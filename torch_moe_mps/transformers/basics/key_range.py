"""Masks of padding whose range of keys is known: nobody reads their values, for which the CPU would wait."""

import torch
from torch import Tensor

# The attribute of such a mask: a tuple of its range, int32 [B, 2], or of None where no key is padding. In a
# captured call a mask has no values.
RANGE = "_moe_mps_range"
NO_END = torch.iinfo(torch.int32).max  # the end of a range that ends with the keys


def known_range(mask: Tensor) -> tuple[Tensor | None] | None:
    """The range of a mask in a tuple, where it is known."""
    return getattr(mask, RANGE, None)
