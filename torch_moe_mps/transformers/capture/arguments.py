"""The arguments of a call: its padding and its rows."""

from typing import Any

from torch import Tensor

from ..attention.causal_mask import range_of_padding
from ..basics.tensors import notes_in

MASK = "attention_mask"


def padding_of(model: Any, arguments: dict[str, Any]) -> tuple[Tensor | None] | None:
    """Result of `range_of_padding` for a call's padding mask; None without one."""
    mask = arguments.get(MASK)
    if type(mask) is not Tensor or mask.dim() != 2:
        return None
    return notes_in(mask).key_range or range_of_padding(mask, mask.shape[1], mask.device, model)


def rows_of(arguments: dict[str, Any]) -> int:
    """Number of rows in the batch of a model's call."""
    ids = arguments.get("input_ids")
    return len(arguments["inputs_embeds"] if ids is None else ids)
