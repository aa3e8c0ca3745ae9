"""Logits in float32 where whoever reads them widens them anyway: `generate`, and the commands.

An output head has its sums in float32. A 16-bit model rounds them; in bfloat16 those between 16 and 32 get
steps of 0.125, so that tokens tie and a greedy answer turns with any rounding.
"""

import functools
from contextvars import ContextVar
from typing import Any

from torch import nn

from .scoped import having

_WIDE: ContextVar[bool] = ContextVar("moe_mps_wide_logits", default=False)

wide_logits = functools.partial(having, _WIDE, True)  # a block whose calls of models have such logits
are_wide = _WIDE.get


def mark_head(model: nn.Module) -> None:
    """Lets the quantised output heads of a model give such logits; a dense one rounds, as torch does."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        head = None if get is None else get()
        if head is not None and hasattr(head, "is_head"):
            head.is_head = True
