"""Counts of parameters of quantised models: packed weights count as the numbers that they stand for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...models.modules.linears import formats_in
from .weights import quantized_names

_NAME = "packed_weights"


class PackedWeights(nn.Module):
    """Stands for the packed weights of a model where parameters are counted.

    PEFT counts `ds_numel` for a parameter without elements: DeepSpeed's name for the size of one whose values
    are elsewhere. State dicts do not have it.

    Args:
        count: number of weights that are packed, less their scales and biases that are parameters.
        like: a tensor with the model's dtype and device.
    """

    def __init__(self, count: int, like: Tensor):
        super().__init__()
        self.count = count
        self.weights = nn.Parameter(like.new_empty(0), requires_grad=False)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Modules, by which torch lists parameters; one that was moved has lost its attributes."""
        weights: Any = self.weights
        weights.ds_numel = self.count
        return super().named_modules(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves nothing."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads nothing."""

    def extra_repr(self) -> str:
        return f"{self.count:,}"


def count_packed_weights(model: nn.Module) -> None:
    """Lets PEFT count the packed weights of a model; shared ones count once."""
    numbers: dict[Tensor, int] = {}  # {packed codes: what they add}
    for module in [*model.modules()]:
        module._modules.pop(_NAME, None)
        for parameter, format in formats_in(module).items():
            packed, *others = (getattr(module, name, None) for name in quantized_names(parameter))
            assert packed is not None
            counted = sum(other.numel() for other in others if isinstance(other, nn.Parameter))
            values = packed.shape[:-1].numel() * format.columns(packed.shape[-1])
            numbers.setdefault(packed, values - counted)
    if numbers:
        floats = (tensor.detach() for tensor in model.parameters() if tensor.is_floating_point())
        like = next(floats, torch.empty(0, device=next(iter(numbers)).device))
        model.add_module(_NAME, PackedWeights(sum(numbers.values()), like))
