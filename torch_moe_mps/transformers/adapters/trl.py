"""TRL's trainers over quantised heads: a function of TRL that multiplies by the rows of a weight gets them.

TRL computes losses in chunks of its own. docs/upstream.md proposes an interface.
"""

from typing import Any

import torch
import trl
from trl.trainer import utils

from ..._versions import TRL
from ..basics.tensors import Deferred
from ..modules.linears import LazyWeight

_NAME = "_ChunkedLogProbFunction"  # in trl.trainer.utils


class Rows(Deferred):
    """A quantised weight as the tensor that autograd functions save; slices of it are decoded rows."""

    weight: LazyWeight

    @staticmethod
    def of(weight: LazyWeight) -> "Rows":
        made: Rows = Rows.made(tuple(weight.shape), weight.dtype, weight.device, weight=weight)
        return made

    def elements(self) -> torch.Tensor:
        return self.weight[:]

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.slice.Tensor and len(args) == 4 and args[1] == 0:
            return args[0].weight[args[2] : args[3]]
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].weight)
        return NotImplemented


class _Decoding:
    """An autograd function that takes quantised weights among its arguments."""

    def __init__(self, function: Any):
        self.function = function

    def apply(self, *args: Any) -> Any:
        return self.function.apply(*(Rows.of(a) if isinstance(a, LazyWeight) else a for a in args))


def register() -> None:
    """Makes TRL's trainers take quantised heads, if this is the version of TRL that is known."""
    if trl.__version__.startswith(f"{TRL}."):
        setattr(utils, _NAME, _Decoding(getattr(utils, _NAME)))
