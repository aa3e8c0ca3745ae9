"""The activation between an expert's two matmuls, and activations of recurrences."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import Check, wide

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
CLAMPED = ("swiglu_oai", "silu_clamped", "silu_capped")
ACTIVATIONS = (*POINTWISE, *CLAMPED)
SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


def sigmoid_anywhere(x: Tensor) -> Tensor:
    """sigmoid(x), with the same bits wherever in memory an element lies.

    torch.sigmoid rounds the last elements, which fill no vector, in another way; so does its softplus.
    """
    return x.neg().exp_().add_(1).reciprocal_()


def softplus_anywhere(x: Tensor) -> Tensor:
    """softplus(x), likewise."""
    return torch.where(x > 20, x, x.exp().log1p_())


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
        if limit is None and name in ("silu_clamped", "silu_capped"):
            check.fail("limit", f"a number for activation {name}", None)

    def apply(self, rows: Tensor) -> Tensor:
        """[..., 2I] -> [..., I] when gated, else [..., I] -> [..., I]; float32 inside and out."""
        rows = wide(rows)
        if not self.gated:
            return POINTWISE[self.activation](rows)
        gate, up = (rows[..., 0::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        if self.activation in POINTWISE:
            return POINTWISE[self.activation](gate).mul_(up)
        limit = SWIGLU_OAI_LIMIT if self.limit is None else self.limit
        up = up.clamp(-limit, limit)
        if self.activation == "silu_capped":
            return F.silu(gate).clamp_(max=limit).mul_(up)
        gate = gate.clamp(max=limit)
        if self.activation == "silu_clamped":
            return F.silu(gate).mul_(up)
        alpha = SWIGLU_OAI_ALPHA if self.alpha is None else self.alpha
        return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1)

    def gradient(self, rows: Tensor, dy: Tensor) -> Tensor:
        """Gradient of the inputs of apply(), in float32. A clamp passes gradients inside its limits."""
        rows, dy = wide(rows), wide(dy)
        if not self.gated:
            return dy * self._slope(rows)
        gate, up = (rows[..., 0::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        if self.activation in POINTWISE:
            of_gate, of_up = dy * up * self._slope(gate), dy * POINTWISE[self.activation](gate)
        else:
            limit = SWIGLU_OAI_LIMIT if self.limit is None else self.limit
            is_capped, kept_up = self.activation == "silu_capped", ~((up > limit) | (up < -limit))
            kept = ~((F.silu(gate) if is_capped else gate) > limit)
            gate, up = gate if is_capped else gate.clamp(max=limit), up.clamp(-limit, limit)
            factor = up + 1 if self.activation == "swiglu_oai" else up
            alpha = SWIGLU_OAI_ALPHA if self.alpha is None else self.alpha
            alpha = alpha if self.activation == "swiglu_oai" else 1.0
            of_gate = (dy * factor * _sigmoid_slope(gate, alpha)).where(kept, 0.0)
            acted = gate * torch.sigmoid(alpha * gate)
            of_up = (dy * (acted.clamp(max=limit) if is_capped else acted)).where(kept_up, 0.0)
        if self.interleaved:
            return torch.stack((of_gate, of_up), dim=-1).flatten(start_dim=-2)
        return torch.cat((of_gate, of_up), dim=-1)

    def _slope(self, x: Tensor) -> Tensor:
        """The derivative of a pointwise activation."""
        if self.activation == "silu":
            return _sigmoid_slope(x, 1.0)
        if self.activation == "gelu":
            density = torch.exp(-0.5 * x * x) * (0.5 / math.pi) ** 0.5
            return 0.5 * torch.erfc(-x * 0.5**0.5) + x * density
        if self.activation == "gelu_tanh":
            twice = 2 * (2 / math.pi) ** 0.5
            value = torch.sigmoid(twice * (x + 0.044715 * x * x * x))
            return value + x * value * (1 - value) * twice * (1 + 3 * 0.044715 * x * x)
        positive = (~(x <= 0)).to(x.dtype)
        return positive if self.activation == "relu" else 2 * x * positive


def _sigmoid_slope(x: Tensor, alpha: float) -> Tensor:
    """The derivative of x * sigmoid(alpha * x)."""
    value = torch.sigmoid(alpha * x)
    return value + alpha * x * value * (1 - value)
