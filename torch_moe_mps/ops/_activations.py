"""The activation between an expert's two matmuls."""

from collections.abc import Callable

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


def check_activation(
    check: Check, activation: str, alpha: float | None, limit: float | None, gated: bool, interleaved: bool
) -> None:
    """A parameter that the activation would ignore is an error: the caller meant another result."""
    check.choice("activation", activation, ACTIVATIONS)
    if activation in CLAMPED and not gated:
        check.fail("gated", f"True for activation {activation}", False)
    if interleaved and not gated:
        check.fail("interleaved", "False when gated is False", True)
    if alpha is not None and activation != "swiglu_oai":
        check.fail("alpha", f"None for activation {activation}", alpha)
    if limit is not None and activation not in CLAMPED:
        check.fail("limit", f"None for activation {activation}", limit)
    if limit is not None:
        check.number("limit", limit, 0.0)
    if limit is None and activation == "silu_clamped":
        check.fail("limit", "a number for activation silu_clamped", None)


def apply_activation(
    rows: Tensor, activation: str, alpha: float | None, limit: float | None, gated: bool, interleaved: bool
) -> Tensor:
    """[n, 2I] -> [n, I] when gated, else [n, I] -> [n, I]; float32 inside and out."""
    rows = rows.float()
    if not gated:
        return POINTWISE[activation](rows)
    gate, up = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=-1)
    if activation in POINTWISE:
        return POINTWISE[activation](gate).mul_(up)
    limit = SWIGLU_OAI_LIMIT if limit is None else limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu_clamped":
        return F.silu(gate).mul_(up)
    alpha = SWIGLU_OAI_ALPHA if alpha is None else alpha
    return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1)
