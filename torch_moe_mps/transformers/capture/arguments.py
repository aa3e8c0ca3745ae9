"""The arguments of a call: what dictionaries hold has a name of its own."""

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
    """How many rows the batch of a model's call has."""
    ids = arguments.get("input_ids")
    return len(arguments["inputs_embeds"] if ids is None else ids)


def flat(arguments: dict[str, Any]) -> dict[Any, Any]:
    """Arguments with what dictionaries hold by (name, key)."""
    if not any(type(value) is dict for value in arguments.values()):
        return arguments
    taken: dict[Any, Any] = {}
    for name, value in arguments.items():
        if type(value) is dict and value:
            taken |= {(name, key): item for key, item in value.items()}
        else:
            taken[name] = value
    return taken


def whole(arguments: dict[Any, Any]) -> dict[str, Any]:
    """The arguments that `flat` has given."""
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(name, tuple):
            made.setdefault(name[0], {})[name[1]] = value
        else:
            made[name] = value
    return made
