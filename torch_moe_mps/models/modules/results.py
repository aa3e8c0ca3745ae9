"""Fields that a model's forward reads of its language model's result, and that this result lacks.

Llama 4 with images in transformers 5.24: its own code raises AttributeError for any call.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args

from torch import nn

from ..basics.state import original_class
from ..upstream.models import ModelOutput

_PART = "language_model"


class _AddFields:
    """Hook of a part: its result gets the fields that it lacks, with None."""

    def __init__(self, fields: list[str]) -> None:
        self._fields = fields

    def __call__(self, part: nn.Module, inputs: Any, result: Any) -> None:
        for field in self._fields:
            if isinstance(result, ModelOutput) and not hasattr(result, field):
                setattr(result, field, None)


def complete_results(model: nn.Module) -> None:
    """Makes models run whose code in transformers raises an error for any call."""
    restore_results(model)
    for part, fields in _lacking(model):
        part.register_forward_hook(_AddFields(fields))


def restore_results(model: nn.Module) -> None:
    """Undoes `complete_results`."""
    for part in model.modules():
        for key in [key for key, hook in part._forward_hooks.items() if isinstance(hook, _AddFields)]:
            del part._forward_hooks[key]


def _lacking(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """(part of a model, fields that the code around it reads, and the class of its result lacks)"""
    for module in model.modules():
        part = module._modules.get(_PART)
        known = set() if part is None else _fields(part)
        if part is not None and known and (others := _fields(module) - known):
            read = inspect.unwrap(original_class(module).forward).__code__.co_names
            if fields := sorted(others.intersection(read)):
                yield part, fields


def _fields(module: nn.Module) -> set[str]:
    """Fields of what a model's forward gives, as its annotation says; none of any other module."""
    given = inspect.signature(original_class(module).forward).return_annotation
    classes: list[Any] = [cls for cls in (get_args(given) or (given,)) if inspect.isclass(cls)]
    outputs = (cls for cls in classes if issubclass(cls, ModelOutput))
    return {field.name for cls in outputs for field in dataclasses.fields(cls)}
