"""RMSNorm fused with the residual stream.

rms(x) = x * rsqrt(mean(x^2) + eps), over the last dimension, in float32, rounded once when stored.
"""

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, Check
from ._registry import operator


def _check_norm(name: str, residual: Tensor, input: Tensor, weight: Tensor, scalar: Tensor | None = None) -> None:
    check = Check(name)
    check.dtype("residual", residual, ACTIVATION_DTYPES)
    if residual.dim() < 1:
        check.fail("residual", "at least 1-D", f"{residual.dim()}-D")
    check.dtype("input", input, (residual.dtype,))
    check.shape("input", input, residual.shape, "[..., H] of residual")
    check.dtype("weight", weight, ACTIVATION_DTYPES)
    check.shape("weight", weight, (residual.shape[-1],), "[H]")
    if scalar is not None:
        check.dtype("scalar", scalar, ACTIVATION_DTYPES)
        if scalar.dim() > 1 or scalar.numel() not in (1, residual.shape[-1]):
            check.fail("scalar", f"of 1 or H = {residual.shape[-1]} elements", tuple(scalar.shape))
    check.same_device(residual=residual, input=input, weight=weight, scalar=scalar)


def _rms(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """rms(x) * (weight + weight_offset) in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + weight_offset)


def _check_norm_add(residual, input, weight, eps, weight_offset=0.0):
    _check_norm("fused_norm_add", residual, input, weight)


def _fake_norm_add(residual, input, weight, eps, weight_offset=0.0):
    return residual.new_empty(residual.shape)


@operator(
    "fused_norm_add(Tensor residual, Tensor input, Tensor weight, float eps, float weight_offset=0.0) -> Tensor",
    check=_check_norm_add,
    fake=_fake_norm_add,
)
def fused_norm_add(
    residual: Tensor, input: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> Tensor:
    """residual + rms(input) * (weight + weight_offset), the order of Gemma's post-norms.

    Args:
        residual, input: [..., H], float32, float16 or bfloat16, of one dtype.
        weight: [H], any of the three dtypes.
        eps: added to the mean of squares.
        weight_offset: 1.0 for zero-centred weights.

    Returns: [..., H] in the dtype of `residual`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Stands for the source kernel fused_norm_add_f32.
    """
    return (residual.float() + _rms(input, weight, eps, weight_offset)).to(residual.dtype)
