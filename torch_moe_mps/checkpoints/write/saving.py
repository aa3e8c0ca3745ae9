"""Saves a model whose tensors are loaded part by part."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.upstream.weights import revert_weight_conversion
from ..layouts.files import Shards
from ..own.saving import config_of


def save_parts(
    model: Any,
    shards: Shards,
    parts: Iterable[Mapping[str, Tensor]],
    beside: Iterable[tuple[str, Tensor]] = (),
    runs_in: torch.dtype | None = None,
) -> None:
    """Equivalent of transformers' `save_pretrained` for a model whose tensors are loaded part by part.

    Args:
        beside: tensors that are written unchanged.
        runs_in: the dtype that config.json names, if other than the tensors' dtype.
    """
    for tensors in parts:
        for name, tensor in revert_weight_conversion(model, dict(tensors)).items():
            shards.add(name, tensor)
    for name, tensor in beside:
        shards.add(name, tensor)
    shards.finish()
    model.config.dtype = str(runs_in or model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    config = config_of(model)
    if config is not None:
        model.config.quantization_config = config
    model.config.save_pretrained(shards.folder)
