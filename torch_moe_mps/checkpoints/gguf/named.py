"""Names and values of a model's parameters in a GGUF file, by the package `gguf`'s tables and a row."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .architectures import Architecture

_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|up_proj|down_proj)(_bias)?$")
_OF_EXPERTS = {
    "gate_up_proj": (("ffn_gate_up_exps",), ("ffn_gate_exps", "ffn_up_exps")),
    "up_proj": (("ffn_up_exps",),),
    "down_proj": (("ffn_down_exps",),),
}
_LAYER = re.compile(r"\.(\d+)\.(.*)")
# Parameters without a module of their own, as gguf's table has them.
_AS_IN_TABLE = {
    r"\.e_score_correction_bias$": ".e_score_correction.bias",
    r"\.expert_bias$": ".expert_bias.bias",
    r"\.dt_bias$": ".dt_proj.bias",
}
# Converts what is joined without a conversion of its own: experts by rows within each.
_BY_EXPERT = re.compile(r"_exps\.")


class Named:
    """Names and values of parameters, by a row of ARCHITECTURES.

    Args:
        architecture: name of the row.
        names: of the tensors in the file.
    """

    def __init__(self, row: Architecture, architecture: str, model: PreTrainedModel, names: Iterable[str]):
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._row, self._config = row, model.config.get_text_config()
        layers = self._config.num_hidden_layers
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._table = get_tensor_name_map(kind, layers)
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        # gguf's table has the names of models with a head
        base = f"{model.base_model_prefix}."
        has_head = any(name.startswith(("model.", base)) for name in self._shapes)
        self._prefix = "" if has_head else base
        self._sources: dict[str, tuple[str, ...]] = {}  # {parameter: its tensors}
        self._parameters: dict[str, list[str]] = {}
        present = frozenset(names)
        for name in self._shapes:
            choices = [*_tensors_of(f"{self._prefix}{name}", self._row, self._table)]
            if choices:
                found = next((each for each in choices if present.issuperset(each)), choices[-1])
                self._sources[name] = found
                for tensor in found:
                    self._parameters.setdefault(tensor, []).append(name)

    def names(self, tensor: Any) -> Iterable[str]:
        """Names of the parameters that a tensor goes into."""
        return self._parameters.get(tensor.name, ())

    def value(self, name: str, values: list[tuple[Any, np.ndarray]]) -> Tensor:
        """A parameter made of the values of its tensors, or of numbers in their place.

        Raises: ValueError where a tensor is missing or has other dimensions.
        """
        of_tensors = {tensor.name: torch.from_numpy(np.array(array)) for tensor, array in values}
        sources = self._sources[name]
        tensors = [of_tensors[source] for source in sources]
        _, _, stem = sources[0].partition("blk.")
        stem = stem.partition(".")[2] if stem else sources[0]
        if (convert := self._row.values.get(stem)) is not None:
            result = convert(self._config, tensors)
        elif len(tensors) > 1:
            result = torch.cat(tensors, 1 if _BY_EXPERT.search(stem) else 0)
        else:
            (result,) = tensors
        return _with_dimensions(result, self._shapes[name])

    def inputs(self, name: str) -> Tensor | None:
        """Order of the inputs of a weight whose columns move; None as no row moves columns."""
        return None


def _tensors_of(name: str, row: Architecture, table: Any) -> Iterator[tuple[str, ...]]:
    """The tensors that a parameter is made of, and others that files may have in their place."""
    layer = _LAYER.search(name)
    if layer is not None:
        block, place = f"blk.{layer[1]}.", layer[2]
        if place in row.joined:
            yield from (tuple(f"{block}{stem}" for stem in stems) for stems in row.joined[place])
            return
        if (experts := _EXPERTS.search(name)) is not None:
            part = "bias" if experts[2] else "weight"
            yield from (tuple(f"{block}{stem}.{part}" for stem in stems) for stems in _OF_EXPERTS[experts[1]])
            return
    for pattern, replacement in {**_AS_IN_TABLE, **row.names}.items():
        name = re.sub(pattern, replacement, name)
    if (found := table.get_name(name, (".weight", ".bias"))) is not None:
        yield (found,)


def _with_dimensions(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A value with as many dimensions as a parameter, where dimensions of one differ.

    Raises: ValueError for more dimensions than the parameter has.
    """
    while value.dim() > len(shape):
        if 1 not in value.shape:
            raise ValueError(f"{tuple(value.shape)} must have {len(shape)} dimensions")
        value = value.squeeze([*value.shape].index(1))
    for place, size in enumerate(shape):
        if value.dim() < len(shape) and size == 1:
            value = value.unsqueeze(place)
    return value
