"""Fields that code of transformers reads in results which lack them."""

from typing import Any

from torch import nn

from ..basics.state import original_class

# {class of a model, whose code raises AttributeError: (the part whose result lacks a field, the field)}
_MISSING = {"Llama4ForConditionalGeneration": ("language_model", "image_outputs")}


def _add_fields(part: nn.Module, inputs: Any, result: Any) -> None:
    """Hook of a part: its result gets the fields that it lacks, with None."""
    for _, field in _MISSING.values():
        if not hasattr(result, field):
            setattr(result, field, None)


def complete_results(model: nn.Module) -> None:
    """Makes models run of which transformers' own code raises an error for any call."""
    for module in model.modules():
        part = _part_of(module)
        if part is not None and _add_fields not in part._forward_hooks.values():
            part.register_forward_hook(_add_fields)


def restore_results(model: nn.Module) -> None:
    """Undoes `complete_results`."""
    for module in model.modules():
        if (part := _part_of(module)) is not None:
            for key in [key for key, hook in part._forward_hooks.items() if hook is _add_fields]:
                del part._forward_hooks[key]


def _part_of(module: nn.Module) -> nn.Module | None:
    name, _ = _MISSING.get(original_class(module).__name__, (None, None))
    return None if name is None else getattr(module, name)
