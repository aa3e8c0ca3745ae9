"""Modules of a model whose weights can be quantised: experts, linear layers and embeddings."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...models.basics.experts import Experts
from ...models.basics.interface import (
    experts_of,
    get_experts,
    is_transposed,
    projections,
    stack_of,
)
from ...models.basics.state import original_class
from ...models.modules.linears import QuantizedLayer
from ...ops._checks import Check
from ...quantization import Format

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass
class Target:
    """A module whose weights can be quantised.

    Attributes:
        kind: "experts", "linears" or "embeddings".
        formats: {parameter: format} of its quantised parameters. If gate and up projections of experts
            differ, "gate_up_proj" is the gate's and "up_proj" the up projection's.
        is_transposed: whether the weight of a linear layer is [input, output], as `is_conv1d` has it.
        has_order: whether a linear layer is an OrderedLinear once it is quantised.
        importance: {parameter: float32 [matrices, C]} mean squares of their inputs, if known.
    """

    name: str
    module: nn.Module
    kind: str
    formats: dict[str, Format] = field(default_factory=dict)
    is_transposed: bool = False
    has_order: bool = False
    importance: dict[str, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> Experts:
        """The experts of a target of kind "experts"."""
        return get_experts(self.module)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that can be quantised."""
        return projections(self.module) if self.kind == "experts" else ("weight",)

    def path(self, parameter: str) -> str:
        """Path of a parameter, as in recipes."""
        return f"{self.name}.{parameter}" if self.kind == "experts" else self.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights while they are dense."""
        return self.dense(self.parameters[0]).dtype

    @property
    def is_split(self) -> bool:
        """True if gate and up projections of experts have different formats."""
        return self.kind == "experts" and self.experts.has_gate and "up_proj" in self.formats

    def dense(self, parameter: str, values: bool = False) -> Tensor:
        """Dense tensor of a parameter, or its gate or up rows if their formats differ.

        Args:
            values: without, a stack that has to be joined is on the meta device.
        """
        if self.is_split and parameter in ("gate_up_proj", "up_proj"):
            halves = stack_of(self.module, "gate_up_proj", values).chunk(
                2, -1 if self.experts.is_transposed else -2
            )
            return halves[parameter == "up_proj"]
        if self.kind == "experts":
            return stack_of(self.module, parameter, values)
        return getattr(self.module, parameter)

    def parts(self, parameter: str) -> list[Tensor]:
        """Dense tensors that a parameter is made of, as `dense` has it."""
        is_whole = self.kind == "experts" and not self.is_split
        return self.experts.matrices(self.module, parameter) if is_whole else [self.dense(parameter)]

    def tensors(self, parameter: str) -> list[Tensor]:
        """The dense parameters of the module that a parameter is made of."""
        if self.kind == "experts":
            tensors: list[Tensor] = self.experts.stack(parameter).tensors(self.module)
            return tensors
        return [getattr(self.module, parameter)]

    def rows_first(self, weight: Tensor) -> Tensor:
        """The view [E, output, input] of a dense parameter; E is 1 for a layer."""
        stack = weight if self.kind == "experts" else weight.unsqueeze(0)
        is_turned = is_transposed(self.module) if self.kind == "experts" else self.is_transposed
        return stack.mT if is_turned else stack

    def read(self, weight: Tensor) -> Tensor:
        """The matrices that a forward reads of a parameter of a checkpoint, which may have more of them."""
        count = self.experts.number if self.kind == "experts" else None
        return weight if count is None else weight[:count]

    def check_columns(self, check: Check) -> None:
        """Raises: ValueError for weights whose rows are not made of whole groups."""
        for parameter, format in self.formats.items():
            columns = self.rows_first(self.dense(parameter)).shape[-1]
            if columns % format.multiple != 0:
                expected = f"of an input dimension that is a multiple of {format.multiple} for {format}"
                check.fail(f"{self.name}.{parameter}", expected, columns)


def quantizable(model: nn.Module) -> dict[str, Target]:
    """All experts, linear layers and embeddings by their names, in the model's order, without formats."""
    experts, result = experts_of(model), {}
    inside = tuple(f"{name}." for name in experts)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if name in experts:
            result[name] = Target(name, module, "experts")
        elif name.startswith(inside):
            continue
        elif isinstance(module, nn.Embedding) or (module is head and isinstance(module, nn.Linear)):
            result[name] = Target(name, module, "embeddings")
        elif isinstance(module, nn.Linear) or is_conv1d(module):
            result[name] = Target(name, module, "linears", is_transposed=not isinstance(module, nn.Linear))
    return result


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D, as in GPT-2: x @ weight + bias, without a convolution."""
    cls = original_class(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def size_of(target: Target) -> int:
    """Bytes of the parameters of a target that have no format; of all, where all have one."""
    dense = [p for p in target.parameters if p not in target.formats] or target.parameters
    weights = (weight for parameter in dense for weight in target.tensors(parameter))
    return sum(weight.nbytes for weight in weights if isinstance(weight, nn.Parameter))


def other_matrices(model: nn.Module, targets: Collection[str]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """(name, module that has it, matrix) of all dense matrices outside of targets, shared ones once.

    A module's `weight` has the name of the module, as recipes and reports have it.
    """
    inside, seen = tuple(f"{name}." for name in targets), set()
    for owner, module in model.named_modules():
        if owner in targets or owner.startswith(inside) or isinstance(module, QuantizedLayer):
            continue
        for parameter, tensor in module._parameters.items():
            if tensor is None or id(tensor) in seen or not tensor.is_floating_point():
                continue
            seen.add(id(tensor))
            if sum(size > 1 for size in tensor.shape) > 1:
                yield f"{owner}.{parameter}".removesuffix(".weight"), module, tensor


def paths_of(targets: Mapping[str, Target]) -> list[str]:
    """Paths, as in recipes, of all quantisable parameters."""
    return [target.path(parameter) for target in targets.values() for parameter in target.parameters]


def layer_of(module: str) -> str:
    """The layer that contains a module, or the module itself."""
    layer = _LAYER.match(module)
    return layer[1] if layer else module


def present(model: nn.Module, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that a model still has after parts of it were replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: target for name, target in targets.items() if modules.get(name) is target.module}
