"""What follows the experts' matmuls: the gated activation and the weighted sum over the slots of a token.

Sums run over the slots in ascending order in float32 and are rounded once, so that a token's sum does not
depend on how many tokens there are.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, Check
from ._registry import operator
from ._sample import Calls, Changes, Sample
from .norms import normed


def _sum_over_slots(slots: Tensor, weights: Tensor) -> Tensor:
    """sum_s weights[..., s] * slots[..., s, :] in float32, s ascending."""
    weights = weights.float().unsqueeze(-1)
    total = torch.zeros_like(slots[..., 0, :], dtype=torch.float32)
    for s in range(slots.shape[-2]):
        total += weights[..., s, :] * slots[..., s, :]
    return total


def _meta_silu_mul(check, gate, up):
    check.dtype("gate", gate, ACTIVATION_DTYPES)
    check.min_rank("gate", gate, 1)
    check.tensor("up", up, gate.shape, "[..., I] of gate", (gate.dtype,))
    return gate.new_empty(gate.shape)


@operator(meta=_meta_silu_mul)
def silu_mul_stacked(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Args:
        gate, up: [..., I], float32, float16 or bfloat16, of one dtype and shape.

    Returns: [..., I] in that dtype.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel silu_mul_stacked_f32.
    """
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


# Weighted sums over the slots


def _meta_weighted_sum(check, slots, weights, residual_=None, norm_weight=None, **others):
    check.dtype("slots", slots, ACTIVATION_DTYPES)
    check.min_rank("slots", slots, 2)
    if slots.shape[-2] < 1:
        check.fail("slots", "[..., S, H] with S at least 1", tuple(slots.shape))
    check.tensor("weights", weights, slots.shape[:-1], "[..., S] of slots")
    sums = (*slots.shape[:-2], slots.shape[-1])
    if residual_ is not None:
        check.tensor("residual_", residual_, sums, "[..., H] of slots", (slots.dtype,))
    check.tensor("norm_weight", norm_weight, sums[-1:], "[H]")
    return slots.new_empty(sums)


@operator(meta=_meta_weighted_sum)
def weighted_sum_stacked(slots: Tensor, weights: Tensor) -> Tensor:
    """sum_s weights[..., s] * slots[..., s, :], s ascending.

    Args:
        slots: [..., S, H], float32, float16 or bfloat16: the outputs of a token's S experts.
        weights: [..., S], any of the three dtypes.

    Returns: [..., H] in the dtype of `slots`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel weighted_sum_stacked_f32.
    """
    return _sum_over_slots(slots, weights).to(slots.dtype)


def _meta_weighted_sum_residual(check, **arguments):
    _meta_weighted_sum(check, **arguments)


@operator(meta=_meta_weighted_sum_residual)
def weighted_sum_residual_stacked_(residual_: Tensor, slots: Tensor, weights: Tensor) -> None:
    """residual_ += sum_s weights[..., s] * slots[..., s, :], s ascending, rounded once.

    Args:
        residual_: [..., H], the dtype of `slots`; updated in place, whatever its strides. It must not overlap
            itself (as an expanded tensor does) nor the other arguments.
        slots, weights: as for weighted_sum_stacked.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel weighted_sum_residual_stacked_f32.
    """
    residual_.copy_(residual_.float() + _sum_over_slots(slots, weights))


@operator(meta=_meta_weighted_sum)
def weighted_sum_residual_norm_stacked_(
    residual_: Tensor, slots: Tensor, weights: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """The end of a layer and the norm of the next.

        residual_ += sum_s weights[..., s] * slots[..., s, :]      s ascending, rounded once
        result = residual_ * rsqrt(mean(residual_^2) + eps) * norm_weight

    In 16 bit residual_ is rounded first, and the norm is taken of the rounded values.

    Args:
        residual_, slots, weights: as for weighted_sum_residual_stacked_.
        norm_weight: [H], any of the three dtypes.
        eps: added to the mean of squares.

    Returns: [..., H] in the dtype of `residual_`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel weighted_sum_residual_norm_stacked_f32.
    """
    residual_.copy_(residual_.float() + _sum_over_slots(slots, weights))
    return normed(residual_, norm_weight, eps).to(residual_.dtype)


# The combine of a whole MoE layer


class ExpertSum(NamedTuple):
    """What a layer adds up around its experts, by the operators' arguments of these names."""

    weights: Tensor
    shared_gate: Tensor | None = None
    shared_out: Tensor | None = None
    residual: Tensor | None = None
    gate_is_logit: bool = False

    def check(self, check: Check, rows: Sequence[int], dtype: torch.dtype) -> None:
        """What is added to the experts' sum, whose shape and dtype are `rows`, (T, H), and `dtype`."""
        if self.gate_is_logit and self.shared_gate is None:
            check.fail("gate_is_logit", "False without shared_gate", True)
        if self.shared_gate is not None:
            if self.shared_out is None:
                check.fail("shared_out", "given when shared_gate is", None)
            check.dtype("shared_gate", self.shared_gate, ACTIVATION_DTYPES)
            if self.shared_gate.dim() == 2:
                check.shape("shared_gate", self.shared_gate, (rows[0], 1), "[T, 1]")
            else:
                check.shape("shared_gate", self.shared_gate, (rows[0],), "[T]")
        check.tensor("shared_out", self.shared_out, rows, "[T, H]", (dtype,))
        if self.residual is not None:
            check.dtype("residual", self.residual, (dtype,))
            shape = self.residual.shape
            if shape[-1:] != tuple(rows[1:]) or math.prod(shape) != math.prod(rows):
                check.fail("residual", f"T = {rows[0]} rows of H = {rows[1]} elements", tuple(shape))

    def added_to(self, total: Tensor) -> Tensor:
        """total + g * shared_out + residual in float32, in that order."""
        if self.shared_out is not None:
            shared = self.shared_out.float()
            if self.shared_gate is not None:
                gate = self.shared_gate.float().reshape(-1, 1)
                shared = (torch.sigmoid(gate) if self.gate_is_logit else gate) * shared
            total = total + shared
        if self.residual is not None:
            total = total + self.residual.float().reshape(total.shape)
        return total


def _meta_weighted_reduce(check, weights, expert_out, **added):
    around = ExpertSum(weights, **added)
    check.dtype("weights", weights, ACTIVATION_DTYPES)
    check.rank("weights", weights, (2,))
    check.dtype("expert_out", expert_out, ACTIVATION_DTYPES)
    check.rank("expert_out", expert_out, (2, 3))
    tokens, top_k = weights.shape
    if top_k < 1:
        check.fail("weights", "[T, K] with K at least 1", tuple(weights.shape))
    width = expert_out.shape[-1]
    if expert_out.dim() == 2:
        check.shape("expert_out", expert_out, (tokens * top_k, width), "[T * K, H]")
    else:
        check.shape("expert_out", expert_out, (tokens, top_k, width), "[T, K, H]")
    around.check(check, (tokens, width), expert_out.dtype)
    return expert_out.new_empty((weights.shape[0], expert_out.shape[-1]))


@operator(meta=_meta_weighted_reduce)
def moe_weighted_reduce(
    weights: Tensor,
    expert_out: Tensor,
    shared_gate: Tensor | None = None,
    shared_out: Tensor | None = None,
    residual: Tensor | None = None,
    gate_is_logit: bool = False,
) -> Tensor:
    """sum_k weights[t, k] * expert_out[t, k] + g[t] * shared_out[t] + residual[t], in that order.

    Args:
        weights: [T, K], float32, float16 or bfloat16: the routing weights.
        expert_out: [T, K, H] or [T * K, H], any of the three dtypes: the experts' outputs.
        shared_gate: [T] or [T, 1], any of the three dtypes: g. Without it g is 1.
        shared_out: [T, H] in the dtype of `expert_out`: the shared expert's output.
        residual: [T, H], or T rows of any leading shape, in the dtype of `expert_out`.
        gate_is_logit: g = sigmoid(shared_gate) instead of shared_gate.

    Returns: [T, H] in the dtype of `expert_out`.

    Raises: ValueError for a dtype, shape or device that does not fit, or a shared_gate without shared_out.

    Stands for the source kernel moe_weighted_reduce_f32.
    """
    total = _sum_over_slots(expert_out.reshape(*weights.shape, expert_out.shape[-1]), weights)
    around = ExpertSum(weights, shared_gate, shared_out, residual, gate_is_logit)
    return around.added_to(total).to(expert_out.dtype)


def _slots(s: Sample) -> dict[str, Any]:
    return {"slots": s.values(s.T, s.K, s.H), "weights": s.weights}


CALLS: Calls = {
    "silu_mul_stacked": lambda s: {"gate": s.values(s.T, s.I), "up": s.values(s.T, s.I)},
    "weighted_sum_stacked": _slots,
    "weighted_sum_residual_stacked_": lambda s: {"residual_": s.values(s.T, s.H), **_slots(s)},
    "weighted_sum_residual_norm_stacked_": lambda s: {
        "residual_": s.values(s.T, s.H),
        **_slots(s),
        "norm_weight": s.values(s.H),
        "eps": 1e-6,
    },
    "moe_weighted_reduce": lambda s: {"weights": s.weights, "expert_out": s.values(s.T, s.K, s.H)},
}
CHANGES: Changes = {
    "silu_mul_stacked": lambda s: [{"gate": s.values(s.I, s.T).t()}],
    "weighted_sum_residual_stacked_": lambda s: [{"residual_": s.values(s.H, s.T).t()}],
    "weighted_sum_residual_norm_stacked_": lambda s: [{"residual_": s.values(s.H, s.T).t()}],
    "moe_weighted_reduce": lambda s: [
        {"expert_out": s.values(s.T * s.K, s.H), **s.shared, "gate_is_logit": True},
        {"residual": s.values(1, s.T, s.H)},
    ],
}
