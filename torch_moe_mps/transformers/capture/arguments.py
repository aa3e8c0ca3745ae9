"""The arguments of a call: what dictionaries and lists hold has a name of its own."""

from typing import Any

from torch import Tensor

from ..attention.causal_mask import range_of_padding

MASK = "attention_mask"


def padding_of(model: Any, arguments: dict[str, Any]) -> tuple[Tensor | None] | None:
    """What `range_of_padding` gives for the mask of padding of a model's call; None where it has none."""
    mask = arguments.get(MASK)
    if type(mask) is not Tensor or mask.dim() != 2:
        return None
    return range_of_padding(mask, mask.shape[1], mask.device, model)


def flat(arguments: dict[str, Any]) -> dict[Any, Any]:
    """Arguments with what dictionaries and lists hold by (name, kind, key)."""
    if not any(type(value) in (dict, list) for value in arguments.values()):
        return arguments
    taken: dict[Any, Any] = {}
    for name, value in arguments.items():
        if type(value) is dict and value:
            taken |= {(name, dict, key): each for key, each in value.items()}
        elif type(value) is list and value:
            taken |= {(name, list, number): each for number, each in enumerate(value)}
        else:
            taken[name] = value
    return taken


def whole(arguments: dict[Any, Any]) -> dict[str, Any]:
    """The arguments that `flat` has given."""
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(name, tuple):
            made[name] = value
        elif name[1] is dict:
            made.setdefault(name[0], {})[name[2]] = value
        else:
            made.setdefault(name[0], []).append(value)
    return made
