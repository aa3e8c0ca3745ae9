"""Random arguments of every operator, from its own domain: sizes, dtypes, options.

The function draw_<operator> of its family in support/ops/ gives valid ones, on the CPU. What it leaves out is
drawn as the operator declares it: tensors, none where they are optional, names, flags and NUMBERS.
"""

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.expert_layers import ACTIVATIONS, random_options
from support.ops import family
from support.quantized_layers import EVERY_FORMAT, WEIGHED, random_quantized
from support.values import DTYPES
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import packet

IDS = (torch.int32, torch.int64)
WIDTHS = (1, 7, 31, 32, 33, 64, 100, 128, 260, 1030, 0)
COUNTS = (1, 2, 3, 5, 9, 33, 0)
# What numbers are in any operator that has an argument of this name.
NUMBERS = {
    "norm_eps": (1e-6, 1e-5, 0.01),
    "norm_weight_offset": (0.0, 1.0),
    "factor": (1.0, 0.22, -3.5),
}
OUTSIDE = {torch.int32: (-1, 2**31 - 1, -(2**31)), torch.int64: (-1, 2**32, 2**40 + 1, -(2**63))}


below = functools.cache(lambda count: st.integers(0, count - 1))  # kept: it is dear to make


class Draws:
    """What hypothesis chooses. Elements of tensors come from a seed: there is nothing for it to find in
    them."""

    def __init__(self, draw):
        self.draw = draw
        self.seed = draw(st.integers(0, 2**16))
        self.generator = torch.Generator().manual_seed(self.seed)

    def one(self, *choices):
        return choices[self.draw(below(len(choices)))]

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.flag() else None

    def dtype(self) -> torch.dtype:
        return self.one(*DTYPES)

    def width(self) -> int:
        return self.one(*WIDTHS)

    def count(self) -> int:
        return self.one(*COUNTS)

    def leading(self) -> tuple[int, ...]:
        return self.one((3,), (), (1,), (0,), (2, 3), (2, 0), (33,), (65,), (2, 1, 4))

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype())

    def ids(self, *shape: int, experts: int) -> Tensor:
        dtype = self.one(*IDS)
        ids = torch.randint(max(1, experts), shape, generator=self.generator)
        for value in self.one((), (experts,), OUTSIDE[dtype]):
            ids[torch.rand(shape, generator=self.generator) < 0.1] = value
        return ids.to(dtype)

    def between(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def format(self) -> str:
        return self.one(*EVERY_FORMAT)

    def weighed_format(self) -> str:
        return self.one(*WEIGHED)

    def quantized(self, *shape_format_dtype_seed: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """random_quantized."""
        return random_quantized(*shape_format_dtype_seed)

    def activation(self) -> dict[str, Any]:
        return self.one(*ACTIVATIONS)

    def options_of_experts(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        return random_options(Random(self.seed), shape, dtype, self.seed)

    def number(self, name: str) -> float:
        return self.one(*NUMBERS[name])

    def arguments_of(self, name: str) -> dict[str, Any]:
        return self.completed(name, getattr(family(name), f"draw_{name}")(self))

    def completed(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        declared = DECLARED[name]
        left = [each for each in packet(name).default._schema.arguments if each.name not in given]
        tensors = [each.name for each in left if not each.has_default_value()]
        for each in left if name not in getattr(family(name), "WHOLE", ()) else ():
            if each.name == "dtype":
                given["dtype"] = self.one(*map(dtype_name, DTYPES))
            elif str(each.type) == "bool":
                given[each.name] = self.flag()
            elif each.name in NUMBERS:
                given[each.name] = self.number(each.name)
            elif str(each.type) == "str":
                given[each.name] = self.one(*declared.allowed[each.name])
            elif str(each.type) == "Optional[Tensor]" and self.flag():
                tensors = [*dict.fromkeys([*tensors, each.name])]
            elif str(each.type) == "Optional[Tensor]":
                given[each.name] = None

        def make(_: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
            return self.values(*shape, dtype=dtype)

        return declared.completed(given, tensors, make, {})
