"""Carries out the plan for a checkpoint of MLX within transformers' loading."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, dot_natural_key

from ....ops._checks import Check
from ..targets import layer_of
from .plan import Plan

_CHECK = Check("load")


class MlxConverter(WeightConverter):
    """A converter of transformers that looks names up in a plan instead of matching patterns."""

    __slots__ = ("plan", "targets_of")

    def __init__(self, plan: Plan):
        super().__init__(_SOURCE, _SOURCE, [_Nothing()])
        self.plan = plan
        self.targets_of = {s: name for name, entry in plan.entries.items() for s in entry.sources}

    def __deepcopy__(self, memo: dict) -> "MlxConverter":
        return MlxConverter(self.plan)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        target = self.targets_of.get(source_key)
        return (source_key, None) if target is None else (target, _SOURCE)

    def convert(self, layer_name: str, **kwargs: Any) -> dict[str, Tensor]:
        entry = self.plan.entries[layer_name]
        (tensors,) = self.materialize_tensors().values()
        came = dict(zip(sorted(entry.sources, key=dot_natural_key), tensors, strict=True))
        owner, _, name = layer_name.rpartition(".")
        shape = getattr(kwargs["model"].get_submodule(owner), name).shape
        value = entry.make(*(came[source] for source in entry.sources))
        if value.shape != shape:
            sources = " and ".join(entry.sources)
            _CHECK.fail(layer_name, f"of shape {tuple(shape)}", f"{tuple(value.shape)} made of {sources}")
        made = {layer_name: value}
        layer = layer_of(layer_name)
        for name in [name for name in self.plan.dropped if layer_of(name) == layer]:
            self.plan.dropped.remove(name)
            made[name] = torch.zeros(self.plan.parameters[name], dtype=self.plan.types_of[name])
        return made


_SOURCE = "tensor of MLX"


class _Nothing:
    """A placeholder: a converter must have operations. `hf_quantizer` lets scales keep their dtype."""

    hf_quantizer = True
    reverse_op = None
