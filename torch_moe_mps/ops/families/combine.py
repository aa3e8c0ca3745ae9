"""Operators after the experts' matmuls: the gated activation and the weighted sum over a token's experts.

Sums run over a token's experts in ascending order in float32 and are rounded once, so that a token's sum
does not depend on how many tokens there are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._activations import Activation
from .._checks import Check, options_in, wide, wide_dtype
from .._registry import Backward, operator
from .._sample import Calls, Changes, Sample
from .norms import normed


def _sum_over_experts(expert_out: Tensor, topk_weights: Tensor) -> Tensor:
    """sum_s topk_weights[..., s] * expert_out[..., s, :] in float32, s ascending."""
    topk_weights = wide(topk_weights).unsqueeze(-1)
    total = torch.zeros_like(expert_out[..., 0, :], dtype=wide_dtype(expert_out))
    for s in range(expert_out.shape[-2]):
        total += topk_weights[..., s, :] * expert_out[..., s, :]
    return total


@operator("gate[..., I] up[..., I]:gate -> gate", public="covers a source kernel")
def silu_mul_stacked(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

    Args:
        gate, up: [..., I], float32, float16 or bfloat16, of one dtype and shape.

    Returns: [..., I] in that dtype.

    Raises: ValueError for a dtype, shape or device that does not fit.

    In models, the experts' first product applies the activation: `moe_experts`, `moe_experts_quantized`.

    Stands for the source kernel silu_mul_stacked_f32; docs/operators.md has the differences.

    Example:
        >>> ops.silu_mul_stacked(torch.tensor([[0.0, 100.0]]), torch.tensor([[5.0, 2.0]])).tolist()
        [[0.0, 200.0]]
    """
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


def _width_of(check, x, activation):
    """Number of output columns of the activation."""
    width = x.shape[-1]
    if activation.gated and width % 2 != 0:
        check.fail("x", "of an even number of columns, gates and ups", tuple(x.shape))
    return width // 2 if activation.gated else width


def _meta_expert_activation(check, x, **options):
    activation = Activation(**options)
    activation.check(check)
    return x.new_empty(*x.shape[:-1], _width_of(check, x, activation))


def _meta_expert_activation_backward(check, dy, x, **options):
    made = _meta_expert_activation(check, x, **options)
    check.shape("dy", dy, made.shape, "[..., I]")
    return x.new_empty(x.shape)


@operator("x[..., N] dy[..., _]:x", _meta_expert_activation_backward)
def _expert_activation_backward(
    dy: Tensor,
    x: Tensor,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    gated: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """The gradient of the input of expert_activation: dy times the derivatives at `x`.

    Args:
        dy: [..., I], the dtype of `x`: the gradient of the output.
        x, activation, alpha, limit, gated, interleaved: as for expert_activation.

    Returns: [..., 2I] ([..., I] when not gated) in the dtype of `x`; computed in float32. Where a clamp
        took another value, and for relu at 0, it is 0; a clamp passes on what lies at its limit.

    Raises: ValueError for a dtype, shape, device or option that does not fit.
    """
    options = Activation(activation, alpha, limit, gated, interleaved)
    return options.gradient(x, dy).to(x.dtype)


def _activation_backward(grad, asked, given):
    options = (given[name] for name in Activation._fields)
    return {"x": torch.ops.moe_mps._expert_activation_backward(grad, given["x"], *options)}


@operator(
    "x[..., N]",
    _meta_expert_activation,
    backward=Backward(_activation_backward, {"x": ("x",)}),
    public="experts matrix by matrix, and their training",
)
def expert_activation(
    x: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    gated: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """The activation between the experts' matrices: act(gate) * up, by the options of moe_experts.

    Args:
        x: [..., 2I] ([..., I] when not gated), float32, float16 or bfloat16: the first matrix's outputs.
        activation, alpha, limit, gated, interleaved: as for moe_experts.

    Returns: [..., I] in the dtype of `x`; computed in float32. Gradients reach `x`.

    Raises: ValueError for a dtype, shape, device or option that does not fit.

    In models that train, or have adapters on experts, it runs between two products.

    Example:
        >>> x = torch.tensor([[2.0, -1.0, 3.0, 4.0]])  # gates 2 and -1, ups 3 and 4
        >>> ops.expert_activation(x, activation="relu").tolist()
        [[6.0, 0.0]]
    """
    options = Activation(activation, alpha, limit, gated, interleaved)
    return options.apply(x).to(x.dtype)


# Weighted sums over the experts of a token


EXPERT_OUT = "expert_out[..., S>=1, H] topk_weights[..., S]"


@operator(f"{EXPERT_OUT} -> [..., H]:expert_out", public="covers a source kernel")
def weighted_sum_stacked(expert_out: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum of expert outputs: sum_s topk_weights[..., s] * expert_out[..., s, :], s ascending.

    Args:
        expert_out: [..., S, H], float32, float16 or bfloat16: the outputs of a token's S experts.
        topk_weights: [..., S], any of the three dtypes.

    Returns: [..., H] in the dtype of `expert_out`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    In models, `moe_experts` and `moe_weighted_reduce` compute this sum.

    Stands for the source kernel weighted_sum_stacked_f32; docs/operators.md has the differences.

    Example:
        >>> expert_out = torch.tensor([[[2.0, -2.0], [4.0, -8.0]]])
        >>> ops.weighted_sum_stacked(expert_out, torch.tensor([[0.5, 0.25]])).tolist()
        [[2.0, -3.0]]
    """
    return _sum_over_experts(expert_out, topk_weights).to(expert_out.dtype)


@operator(f"{EXPERT_OUT} residual_[..., H]:expert_out -> residual_", public="covers a source kernel")
def weighted_sum_residual_stacked_(residual_: Tensor, expert_out: Tensor, topk_weights: Tensor) -> Tensor:
    """Residual stream plus the weighted sum of expert outputs, in place.

        residual_ += sum_s topk_weights[..., s] * expert_out[..., s, :]      s ascending, rounded once

    Args:
        residual_: [..., H], the dtype of `expert_out`; updated in place, whatever its strides. It must not
            overlap itself (as an expanded tensor does) nor the other arguments.
        expert_out, topk_weights: as for weighted_sum_stacked.

    Returns: `residual_`. `torch.ops.moe_mps` itself returns nothing.

    Raises: ValueError for a dtype, shape or device that does not fit.

    In models, `moe_experts` adds the residual itself.

    Stands for the source kernel weighted_sum_residual_stacked_f32; docs/operators.md has the differences.

    Example:
        >>> residual, expert_out = torch.tensor([[1.0, 1.0]]), torch.tensor([[[2.0, -2.0], [4.0, -8.0]]])
        >>> ops.weighted_sum_residual_stacked_(residual, expert_out, torch.tensor([[0.5, 0.25]])).tolist()
        [[3.0, -2.0]]
    """
    return residual_.copy_(wide(residual_) + _sum_over_experts(expert_out, topk_weights))


@operator(
    f"{EXPERT_OUT} residual_[..., H]:expert_out norm_weight[H] -> [..., H]:expert_out",
    public="covers a source kernel",
)
def weighted_sum_residual_norm_stacked_(
    residual_: Tensor, expert_out: Tensor, topk_weights: Tensor, norm_weight: Tensor, *, norm_eps: float
) -> Tensor:
    """Residual stream plus the weighted sum of expert outputs, in place, and its RMSNorm.

        residual_ += sum_s topk_weights[..., s] * expert_out[..., s, :]      s ascending, rounded once
        result = residual_ * rsqrt(mean(residual_^2) + norm_eps) * norm_weight

    In 16 bit residual_ is rounded first, and the norm is taken of the rounded values.

    Args:
        residual_, expert_out, topk_weights: as for weighted_sum_residual_stacked_.
        norm_weight: [H], any of the three dtypes.
        norm_eps: added to the mean of squares.

    Returns: [..., H] in the dtype of `residual_`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    In models, `moe_experts` sums, and the next operator normalises its input.

    Stands for the source kernel weighted_sum_residual_norm_stacked_f32;
    docs/operators.md has the differences.

    Example:
        >>> residual, expert_out = torch.tensor([[0.0, 1.0]]), torch.tensor([[[2.0, -2.0], [4.0, -8.0]]])
        >>> weights, norm_weight = torch.tensor([[0.5, 0.25]]), torch.tensor([1.0, 10.0])
        >>> added = residual, expert_out, weights, norm_weight
        >>> ops.weighted_sum_residual_norm_stacked_(*added, norm_eps=0.0).tolist()
        [[1.0, -10.0]]
        >>> residual.tolist()
        [[2.0, -2.0]]
    """
    residual_.copy_(wide(residual_) + _sum_over_experts(expert_out, topk_weights))
    return normed(residual_, norm_weight, norm_eps).to(residual_.dtype)


# The combine of a whole MoE layer

# Summands of the experts' sum, beside a tensor of its dtype.
ADDED = "shared_gate[..., 1]|[...] shared_out[..., H]:{0} residual:{0}"


class ExpertSum(NamedTuple):
    """Summands of a layer beside its experts' results, by the names of the operators' arguments."""

    shared_gate: Tensor | None = None
    shared_out: Tensor | None = None
    residual: Tensor | None = None
    gate_is_logit: bool = False

    def check(self, check: Check) -> None:
        """Checks beyond the declaration of the tensors. ... and H are the sizes of the sum."""
        if self.gate_is_logit and self.shared_gate is None:
            check.fail("gate_is_logit", "False without shared_gate", True)
        if self.shared_gate is not None and self.shared_out is None:
            check.fail("shared_out", "given when shared_gate is", None)
        if self.residual is not None:
            sizes, shape = check.sizes, self.residual.shape
            rows, width = math.prod(sizes["..."]), sizes["H"]
            if shape[-1:] != (width,) or math.prod(shape) != rows * width:
                check.fail("residual", f"T = {rows} rows of H = {width} elements", tuple(shape))

    def added_to(self, total: Tensor) -> Tensor:
        """total + g * shared_out + residual in float32, in that order."""
        if self.shared_out is not None:
            shared = wide(self.shared_out).reshape(total.shape)
            if self.shared_gate is not None:
                gate = wide(self.shared_gate).reshape(*total.shape[:-1], 1)
                shared = (torch.sigmoid(gate) if self.gate_is_logit else gate) * shared
            total = total + shared
        if self.residual is not None:
            total = total + wide(self.residual).reshape(total.shape)
        return total


# Outputs of experts, and their weights.
OUT_AND_WEIGHTS = "topk_weights[..., K>=1] expert_out[..., K, H]|[...*K, H]"


def _meta_weighted_reduce_backward(check, topk_weights, expert_out, **_):
    of_weights = topk_weights.new_empty(topk_weights.shape, dtype=wide_dtype(topk_weights))
    return expert_out.new_empty(expert_out.shape), of_weights


@operator(
    f"{OUT_AND_WEIGHTS} dy[..., H]:expert_out",
    _meta_weighted_reduce_backward,
)
def _moe_weighted_reduce_backward(
    dy: Tensor, expert_out: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of moe_weighted_reduce: topk_weights[t, k] * dy[t], and dy[t] . expert_out[t, k].

    Args:
        dy: [..., H], the dtype of `expert_out`: the gradient of the output.
        expert_out, topk_weights: as for moe_weighted_reduce.

    Returns: the gradient of `expert_out`, in its shape and dtype, and of `topk_weights`, [..., K] in float32.

    Raises: ValueError for a dtype, shape or device that does not fit.
    """
    rows = wide(dy).unsqueeze(-2)
    products = (wide(expert_out).reshape(*topk_weights.shape, dy.shape[-1]) * rows).sum(-1)
    gradient = (wide(topk_weights).unsqueeze(-1) * rows).to(expert_out.dtype)
    return gradient.reshape(expert_out.shape), products.to(wide_dtype(topk_weights))


def _reduce_backward(grad, asked, given):
    topk_weights = given["topk_weights"]
    backward = torch.ops.moe_mps._moe_weighted_reduce_backward
    gradient, products = backward(grad, given["expert_out"], topk_weights)
    return {"expert_out": gradient, "topk_weights": products.to(topk_weights.dtype)}


def _check_weighted_reduce(check, **given):
    options_in(given, ExpertSum).check(check)


@operator(
    f"{OUT_AND_WEIGHTS} {ADDED.format('expert_out')} -> [..., H]:expert_out",
    _check_weighted_reduce,
    backward=Backward(
        _reduce_backward,
        dict.fromkeys(("topk_weights", "expert_out"), ("topk_weights", "expert_out")),
        unless=("shared_gate", "shared_out", "residual"),
    ),
    public="experts matrix by matrix, and their training",
)
def moe_weighted_reduce(
    expert_out: Tensor,
    topk_weights: Tensor,
    shared_gate: Tensor | None = None,
    shared_out: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gate_is_logit: bool = False,
) -> Tensor:
    """Weighted sum over a token's experts, with the shared expert and the residual.

    sum_k topk_weights[t, k] * expert_out[t, k] + g[t] * shared_out[t] + residual[t], added in this order.

    Args:
        expert_out: [..., K, H], or T * K rows [T * K, H]; float32, float16 or bfloat16: the experts' outputs.
        topk_weights: [..., K], any of the three dtypes: the routing weights.
        shared_gate: [..., 1] or [...], any of the three dtypes: g. Without it g is 1.
        shared_out: [..., H] in the dtype of `expert_out`: the shared expert's output.
        residual: [..., H], or as many rows of any leading shape, in the dtype of `expert_out`.
        gate_is_logit: g = sigmoid(shared_gate) instead of shared_gate.

    Returns: [..., H] in the dtype of `expert_out`. Gradients reach `topk_weights` and `expert_out` where it
        adds nothing else.

    Raises: ValueError for a dtype, shape or device that does not fit, or a shared_gate without shared_out.

    Stands for the source kernel moe_weighted_reduce_f32; docs/operators.md has the differences.

    Example:
        >>> expert_out, topk_weights = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0.5, 0.25]])
        >>> ops.moe_weighted_reduce(expert_out, topk_weights, residual=torch.tensor([[10.0]])).tolist()
        [[11.0]]
    """
    total = _sum_over_experts(expert_out.reshape(*topk_weights.shape, expert_out.shape[-1]), topk_weights)
    around = ExpertSum(shared_gate, shared_out, residual, gate_is_logit)
    return around.added_to(total).to(expert_out.dtype)


def _flat(s: Sample) -> dict[str, Tensor]:
    """Outputs of experts in rows of pairs."""
    return {"expert_out": s.values(s.T * s.K, s.H), "topk_weights": s.topk_weights}


CALLS: Calls = {
    "silu_mul_stacked": lambda s: {},
    "expert_activation": lambda s: s.of("x[T, K, I]"),
    "_expert_activation_backward": lambda s: {
        "x": s.values(s.T, s.K, 2 * s.I),
        "dy": s.values(s.T, s.K, s.I),
    },
    "_moe_weighted_reduce_backward": lambda s: s.of("expert_out[T, K, H]", topk_weights=s.topk_weights),
    **dict.fromkeys(
        ("weighted_sum_stacked", "weighted_sum_residual_stacked_", "moe_weighted_reduce"),
        lambda s: {"topk_weights": s.topk_weights},
    ),
    "weighted_sum_residual_norm_stacked_": lambda s: {"topk_weights": s.topk_weights, "norm_eps": 1e-6},
}
# Options of expert_activation, each with a formula or an order of rows of its own.
_OPTIONS: list[dict] = [
    *({"activation": name} for name in ("gelu", "gelu_tanh", "relu", "relu2")),
    {"activation": "swiglu_oai", "interleaved": True},
    {"activation": "silu_clamped", "limit": 0.5},
    {"activation": "silu_capped", "limit": 0.5},
]

CHANGES: Changes = {
    "silu_mul_stacked": lambda s: [{"gate": s.values(s.I, s.T).t()}],
    "expert_activation": lambda s: [*_OPTIONS, {"gated": False}],
    "_expert_activation_backward": lambda s: [
        *_OPTIONS,
        {"x": s.values(s.T, s.K, s.I), "dy": s.values(s.T, s.K, s.I), "gated": False},
    ],
    "_moe_weighted_reduce_backward": lambda s: [_flat(s) | {"expert_out": s.values(s.T * s.K, 63)}],
    "weighted_sum_residual_stacked_": lambda s: [{"residual_": s.values(s.H, s.T).t()}],
    "weighted_sum_residual_norm_stacked_": lambda s: [{"residual_": s.values(s.H, s.T).t()}],
    "moe_weighted_reduce": lambda s: [
        {**_flat(s), **s.shared, "gate_is_logit": True},
        {"residual": s.values(1, s.T, s.H)},
    ],
}
