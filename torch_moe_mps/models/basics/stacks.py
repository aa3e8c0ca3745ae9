"""Stacks of the matrices of experts: the tensors of a module that they are, and products with them.

A stack holds names and no tensors, so copies and replicas of a module share it.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...quantization import TENSORS, Format

ops = torch.ops.moe_mps

_NAMES = ("gate_up_proj", "up_proj", "down_proj")
# The names of the tensors of a packed projection, made once instead of in each call.
_PACKED = {name: tuple(f"{name}_{part}" for part in TENSORS) for name in _NAMES}


class Stack(NamedTuple):
    """Dense parameters below a module that are one stack of matrices together, joined by outputs.

    Attributes:
        names: paths of the parameters, [E, rows, columns]. They may have further matrices, which no forward
            reads.
        is_flat: whether they are [E * rows, columns].
        is_transposed: whether their rows are the inputs.
    """

    names: tuple[str, ...]
    is_flat: bool = False
    is_transposed: bool = False

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The parameters of a module."""
        if len(self.names) == 1:  # a comprehension would be another call of Python, for each layer of a token
            return [attrgetter(self.names[0])(module)]
        return [attrgetter(path)(module) for path in self.names]

    def matrices(self, module: nn.Module, count: int | None) -> list[Tensor]:
        """The matrices [count, rows, columns] of a module; None for all that it has."""
        tensors = self.tensors(module)
        return tensors if count is None else self.views(tensors, count)

    def views(self, parts: Sequence[Tensor], count: int | None) -> list[Tensor]:
        """The matrices [count, rows, columns] of parameters; None for all that they have."""
        if count is None:
            return [*parts]
        if self.is_flat:
            return [part.view(count, -1, part.shape[1]) for part in parts]
        return [part if len(part) == count else part[:count] for part in parts]

    def joined(self, parts: Sequence[Tensor], count: int | None) -> Tensor:
        """The stack [count, output, input] of the parameters."""
        views = [view.mT if self.is_transposed else view for view in self.views(parts, count)]
        return views[0] if len(views) == 1 else torch.cat(views, 1)

    def split(self, stack: Tensor) -> list[Tensor]:
        """The parameters of a stack [E, output, input]."""
        views = stack.chunk(len(self.names), 1)
        parts = [(view.mT if self.is_transposed else view).contiguous() for view in views]
        return [part.flatten(0, 1) if self.is_flat else part for part in parts]

    def multiply(
        self, module: nn.Module, count: int | None, x: Tensor, ids: Tensor, bias: Tensor | None
    ) -> list[Tensor]:
        """[T, K, rows] of each parameter: rows of x times the matrices of their experts."""
        views = self.matrices(module, count)
        biases = [None] * len(views) if bias is None else bias.chunk(len(views), -1)
        return [
            ops.expert_mm(x, ids, view, part, transposed=self.is_transposed)
            for view, part in zip(views, biases, strict=True)
        ]


class PackedStack(NamedTuple):
    """Packed matrices of a module in place of a dense stack, joined by outputs.

    Attributes:
        names: of the projections: one, or gate and up projections in a format each.
        formats: of each.
        is_transposed: whether the rows of the dense stack were the inputs.
    """

    names: tuple[str, ...]
    formats: tuple[Format, ...]
    is_transposed: bool = False

    def tensors(self, module: nn.Module) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """(packed codes, scales, biases) of each projection."""
        every, result = module._parameters | module._buffers, []
        for name in self.names:
            names = _PACKED[name]
            packed, scales, biases = every.get(names[0]), every.get(names[1]), every.get(names[2])
            if packed is None or scales is None:  # not where `quantize` put them
                packed, scales = getattr(module, names[0]), getattr(module, names[1])
                biases = getattr(module, names[2], None)
            result.append((packed, scales, biases))
        return result

    def multiply(
        self, module: nn.Module, count: int | None, x: Tensor, ids: Tensor, bias: Tensor | None
    ) -> list[Tensor]:
        """[T, K, rows]: rows of x times the matrices of their experts."""
        biases = [None] * len(self.names) if bias is None else bias.chunk(len(self.names), -1)
        outs = [
            ops.expert_qmm(x, ids, *tensors, format=format.name, bias=part)
            for tensors, format, part in zip(self.tensors(module), self.formats, biases, strict=True)
        ]
        return [outs[0] if len(outs) == 1 else torch.cat(outs, -1)]

    def shape(self, module: nn.Module) -> tuple[int, int, int]:
        """[experts, outputs, inputs] of the matrices."""
        (first, *_), *rest = self.tensors(module)
        rows = first.shape[1] + sum(packed.shape[1] for packed, *_ in rest)
        return first.shape[0], rows, self.formats[0].columns(first.shape[2])
