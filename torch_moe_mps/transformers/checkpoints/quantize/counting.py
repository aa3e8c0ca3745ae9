"""Counts of parameters: packed weights count as the numbers that they stand for."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ...modules.linears import QuantizedEmbedding, formats_in
from .weights import quantized_names


def packed_parameters(model: nn.Module, exclude_embeddings: bool = False) -> int:
    """How many numbers packed weights stand for, less the scales and biases that count as parameters.

    Shared words count once. With `exclude_embeddings` an embedding's do not, and its scales are taken off.
    """
    numbers: dict[int, int] = {}  # {id of the words: what they add}
    for module in model.modules():
        for parameter, format in formats_in(module).items():
            packed, *others = (getattr(module, name, None) for name in quantized_names(parameter))
            counted = sum(other.numel() for other in others if isinstance(other, nn.Parameter))
            is_left_out = exclude_embeddings and isinstance(module, QuantizedEmbedding)
            assert packed is not None
            values = 0 if is_left_out else packed.shape[:-1].numel() * format.columns(packed.shape[-1])
            numbers.setdefault(id(packed), values - counted)
    return sum(numbers.values())


def count_packed(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """In place of a quantised model's own `num_parameters`: the numbers that its weights stand for."""
    own: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    return own if only_trainable else own + packed_parameters(model, exclude_embeddings)


def counting_packed(own: Callable) -> Callable:
    """PEFT's count of (trainable, all) parameters of a model, packed weights included."""

    @functools.wraps(own)
    def count(model: nn.Module) -> tuple[int, int]:
        trainable, total = own(model)
        return trainable, total + packed_parameters(model)

    return count
