"""Compares the first call of a program on a machine with the same call module by module.

The self-check compares operators. What only a program has is compared here: its order, its passes, its
kernels of joined operators, and the places that it reads and writes.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...ops import _registry
from ...selfcheck.machine import late_before, passed_before, remember, where
from ..graphs.tracing import TENSOR, VALUE

# Length of the difference between two logits, relative to them: what roundings of a whole model change.
# Passes join roundings, and where a router is nearly undecided another expert may be chosen.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.25}


def is_wanted() -> bool:
    """True while the self-check compares the first calls of operators."""
    return _registry.before_first_call is not None


class FirstCall:
    """Whether a program has agreed with the model on this machine.

    Attributes:
        label: under which the machine remembers it; equal for equal graphs, shapes and dtypes.
        has_passed: True once it has agreed, in this process or in an earlier one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        tensors = [tensor for node in graph.nodes for tensor in _tensors(node)]
        text = "\n".join((str(graph), *(f"{t.dtype}{[*map(str, t.shape)]}" for t in tensors)))
        self.label = f"captured call {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.has_passed = self.label in passed_before()
        # Logits may be wider than what they are computed from.
        self._bound = max((TOLERANCE.get(t.dtype, 0.0) for t in tensors), default=TOLERANCE[torch.float32])

    def compare(self, result: Any, expected: Any) -> str | None:
        """Difference of a call's result from the model's; None, and remembered, if there is none.

        Args:
            result, expected: model outputs or tuples, with the logits first.
        """
        actual, wanted = _first_tensor(result), _first_tensor(expected)
        if actual.shape != wanted.shape:
            return f"its logits have the shape {[*actual.shape]} and not {[*wanted.shape]}"
        # float32 on the CPU: neither an operator of this package nor a kernel of torch's may hide a fault.
        a, b = (tensor.detach().to("cpu", torch.float32).flatten() for tensor in (actual, wanted))
        known = b.isfinite()
        error = float((a - b)[known].norm() / b[known].norm().clamp_min(1e-30))
        if not error <= self._bound or not torch.equal(a.isfinite(), known):
            return (
                f"on this machine ({where()}) the logits of a captured token differ by {error:.1e} of their "
                f"length from those of the same token module by module, more than {self._bound}"
            )
        self.has_passed = True
        remember(passed_before() | {self.label}, late_before())
        return None


def _first_tensor(output: Any) -> Tensor:
    first: Tensor = output[0]
    return first


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    """A constant, or what a call makes."""
    value = node.meta.get(TENSOR, node.meta.get(VALUE))
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, Tensor):
            yield item
