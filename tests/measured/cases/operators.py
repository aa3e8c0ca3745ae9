"""Cases of one operator, which the tests' oracle of it checks."""

from typing import Any, ClassVar

import numpy as np
import torch
from support import oracles, oracles_operators
from support.oracles_operators import Expected
from torch import Tensor

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
    """Inputs have the names of the operator's arguments."""

    slack: ClassVar[float] = 0.0  # a tolerance that is larger than one rounding

    def random(self, values, *shape: int) -> Tensor:
        return values.normal(*shape, dtype=DTYPES[self.dtype])

    def given(self, t: dict[str, Tensor]) -> dict[str, Any]:
        """The operator's arguments."""
        return t

    def call(self, t):
        return getattr(ops(), self.operator)(**self.given(t))

    @property
    def mutated(self):
        return tuple(oracles_operators.written(self.operator))

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
