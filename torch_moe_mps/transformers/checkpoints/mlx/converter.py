"""Carries out the plan for a checkpoint of MLX within transformers' loading."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightConverter, dot_natural_key

from ....ops._checks import Check
from ..files import empty_whole, in_a_file, in_files
from .plan import Entry, Plan

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
        value = _made(entry, [came[source] for source in entry.sources])
        if value.shape != shape:
            sources = " and ".join(entry.sources)
            _CHECK.fail(layer_name, f"of shape {tuple(shape)}", f"{tuple(value.shape)} made of {sources}")
        made = {layer_name: value}
        while self.plan.dropped:
            name = self.plan.dropped.pop()
            made[name] = torch.zeros(self.plan.parameters[name], dtype=self.plan.types_of[name])
        return made


def _made(entry: Entry, tensors: Sequence[Tensor]) -> Tensor:
    """Makes a parameter; within `tensors_in`, new tensors are put into files.

    Experts are made one at a time, because the allocator may keep the memory of large tensors.
    """
    if in_files() and entry.by_matrix and len(entry.sources) > 1:
        whole = len(tensors[0]), *entry.make(*(tensor[:1] for tensor in tensors)).shape[1:]
        with empty_whole(torch.Size(whole)) as file:
            for matrices in zip(*(tensor.split(1) for tensor in tensors), strict=True):
                file.append(entry.make(*matrices))
            return file.tensor()
    made = entry.make(*tensors)
    memory = made.untyped_storage().data_ptr()
    return made if any(memory == s.untyped_storage().data_ptr() for s in tensors) else in_a_file(made)


_SOURCE = "tensor of MLX"


class _Nothing:
    """A placeholder: a converter must have operations. `hf_quantizer` lets scales keep their dtype."""

    hf_quantizer = True
    reverse_op = None
