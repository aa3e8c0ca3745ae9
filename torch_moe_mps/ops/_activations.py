"""The activation between an expert's two matmuls."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import Check

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
CLAMPED = ("swiglu_oai", "silu_clamped")
ACTIVATIONS = (*POINTWISE, *CLAMPED)
SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


class Activation(NamedTuple):
    """An activation, by the operators' arguments of these names."""

    activation: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    gated: bool = True
    interleaved: bool = False

    def check(self, check: Check) -> None:
        """A parameter that the activation would ignore is an error: the caller expects another result."""
        name, alpha, limit, gated, interleaved = self
        check.choice("activation", name, ACTIVATIONS)
        if name in CLAMPED and not gated:
            check.fail("gated", f"True for activation {name}", False)
        if interleaved and not gated:
            check.fail("interleaved", "False when gated is False", True)
        if alpha is not None and name != "swiglu_oai":
            check.fail("alpha", f"None for activation {name}", alpha)
        if alpha is not None and not math.isfinite(alpha):
            check.fail("alpha", "a finite number", alpha)
        if limit is not None and name not in CLAMPED:
            check.fail("limit", f"None for activation {name}", limit)
        if limit is not None:
            check.number("limit", limit, 0.0)
        if limit is None and name == "silu_clamped":
            check.fail("limit", "a number for activation silu_clamped", None)

    def apply(self, rows: Tensor) -> Tensor:
        """[..., 2I] -> [..., I] when gated, else [..., I] -> [..., I]; float32 inside and out."""
        rows = rows.float()
        if not self.gated:
            return POINTWISE[self.activation](rows)
        gate, up = (rows[..., 0::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        if self.activation in POINTWISE:
            return POINTWISE[self.activation](gate).mul_(up)
        limit = SWIGLU_OAI_LIMIT if self.limit is None else self.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if self.activation == "silu_clamped":
            return F.silu(gate).mul_(up)
        alpha = SWIGLU_OAI_ALPHA if self.alpha is None else self.alpha
        return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1)
