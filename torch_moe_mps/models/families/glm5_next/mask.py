"""The mask that attention makes of what an indexer has chosen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.causal_mask import CausalMask
from ...attention.chosen_keys import Choice

EVERYTHING = "everything"  # in place of a Choice where tokens may choose all keys
METHOD = "build_attention_mask_from_topk"  # a method of attention layers


def masks_choices(module: nn.Module) -> bool:
    return hasattr(module, METHOD)


def taking_choices(original: Callable) -> Callable:
    """The method of rewritten layers that makes a mask of chosen keys, and takes what our indexers give."""

    def build(self: nn.Module, topk_indices: Any, query_states: Tensor, kv_length: int) -> Tensor | None:
        batch, _, tokens, _ = query_states.shape
        if isinstance(topk_indices, Choice):
            return topk_indices.as_mask(None, 1, tokens, kv_length)
        if topk_indices is not EVERYTHING:
            mask: Tensor = original(self, topk_indices, query_states, kv_length)
            return mask
        mask = CausalMask((batch, 1, tokens, kv_length), kv_length, None, torch.bool, query_states.device)
        return None if mask.hides_nothing or mask.is_of_first_tokens else mask

    return build
