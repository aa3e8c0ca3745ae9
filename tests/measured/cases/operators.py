"""Cases of one operator, which the tests' oracle of it checks."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from support import oracles, oracles_operators
from support.oracles_operators import Expected
from torch import Tensor

from torch_moe_mps.ops._declared import tensors_in
from torch_moe_mps.ops._registry import DECLARED

from .experts import Case, ops
from .formats import DTYPES

EPS = 1e-6
# The norm of the difference, relative to the norm of the result, of one rounding to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def differs(actual: Tensor, right: Expected, slack: float = 0.0) -> str:
    """Empty, or how far `actual` is from what the oracle knows: where that has no error, they are equal."""
    found, value, is_float = oracles.exact(actual), right.value, actual.is_floating_point()
    error = np.broadcast_to(0.0 if right.error is None else right.error, value.shape)
    same, near = (right.known & (error == 0), right.known & (error > 0))
    wrong = same & (found != (oracles.round_to(value, actual.dtype) if is_float else value))
    if wrong.any():
        return f"{wrong.sum()} numbers differ"
    distance = np.linalg.norm((found - value)[near]) / max(np.linalg.norm(value[near]), 1e-30)
    return "" if not near.any() or distance < max(TOLERANCE[actual.dtype], slack) else f"error {distance:.1e}"


class OperatorCase(Case):
    """Inputs have the names of the operator's arguments. The fields of a family are in its head, in order.

    Attributes:
        tensors: random ones, in a line as operators declare theirs: sizes are numbers and attributes, dtypes
            those of DTYPES, without one the case's. What else the operator needs is as it is declared.
        scales: of tensors that are not about 1.
        options: what the operator gets beside tensors.
        slack: a tolerance that is larger than one rounding.
    """

    tensors: ClassVar[str] = ""
    scales: ClassVar[dict] = {}
    options: ClassVar[dict] = {}
    slack: ClassVar[float] = 0.0

    def __init_subclass__(cls, fields: str = ""):
        super().__init_subclass__()
        if fields:
            cls.__annotations__ = dict.fromkeys(fields.split(), Any)
            dataclass(cls)

    def inputs(self, values):
        def make(name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
            return values.normal(*shape, dtype=dtype or torch.float32, scale=self.scales.get(name, 1.0))

        given = {
            name: make(name, shape.result(self.sizes), DTYPES[kind or self.dtype])
            for name, (shape,), kind in tensors_in(self.tensors)
        }
        given |= self.others(values)
        return DECLARED[self.operator].completed(given, self.required - self.options.keys(), make, {})

    @property
    def required(self) -> set[str]:
        arguments = getattr(ops(), self.operator).default._schema.arguments
        return {argument.name for argument in arguments if not argument.has_default_value()}

    def others(self, values) -> dict[str, Tensor]:
        """Tensors that are no random numbers around 0."""
        return {}

    @property
    def sizes(self) -> dict[str, int]:
        return vars(self)

    def given(self, t: dict[str, Tensor]) -> dict[str, Any]:
        """The operator's arguments."""
        return t | self.options

    def call(self, t):
        return getattr(ops(), self.operator)(**self.given(t))

    @property
    def mutated(self):
        given = self.required | {name for name, *_ in tensors_in(self.tensors)}
        return tuple(name for name in oracles_operators.written(self.operator) if name in given)

    def wrong(self, before, after):
        results = sorted(name for name in after if name.startswith("result"))
        given, found = self.given(before), [after[name] for name in results]
        right = oracles_operators.expected(self.operator, given, found)
        pairs = zip((*results, *self.mutated), right, strict=True)
        said = (differs(after[name], each, self.slack) for name, each in pairs)
        return next(filter(None, said), "")

    def bytes_moved(self, t, part=""):
        """The inputs, what of them is written, and the results."""
        results = self.call({name: tensor.to("meta") for name, tensor in t.items()})
        results = results if isinstance(results, tuple) else () if results is None else (results,)
        written = [t[name] for name in self.mutated]
        return sum(tensor.nbytes for tensor in (*t.values(), *written, *results))
