"""RMSNorm and LayerNorm, alone and fused with the residual stream."""

import pytest
import torch
from support.oracles import exact
from support.oracles_operators import checked
from support.values import EACH_DTYPE, random

from torch_moe_mps.ops.families.norms import (
    fused_residual_layer_norm,
    fused_residual_norm,
    fused_residual_norm_scalar,
    layer_norm,
    rms_norm,
)

EPS = 1e-6
# The sum of squares, the root and the products, each rounded once or twice.
FLOAT32_ERRORS = 12


def check_all(residual, input, weight, scalar, eps=EPS, weight_offset=0.0):
    """The operators on these tensors."""
    options = {"norm_eps": eps, "norm_weight_offset": weight_offset}
    checked("rms_norm", input, weight, **options)
    checked("rms_norm", input, None, norm_eps=eps, factor=0.22)
    checked("layer_norm", input, weight, weight.flip(0), **options)
    checked("layer_norm", input, None, None, norm_eps=eps)
    checked("fused_residual_layer_norm", residual, input, weight, weight.flip(0), **options)
    checked("fused_residual_layer_norm", residual, input, None, weight, norm_eps=eps)
    checked("fused_norm_add", residual, input, weight, **options)
    checked("fused_norm_add_scalar", residual, input, weight, scalar, **options)
    checked("fused_residual_norm", residual, input, weight, **options)
    checked("fused_residual_norm", residual, input, weight, factor=3.5, **options)
    checked("fused_residual_norm_scalar", residual, input, weight, scalar, **options)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_rows_with_weights_of_their_own(device, dtype):
    """Groups of columns that are normed apart: rows of a simdgroup and of a threadgroup, also strided."""
    for i, (tokens, groups, width) in enumerate([(1, 4, 64), (3, 3, 31), (2, 2, 1030), (5, 1, 8)]):
        input = random((tokens, groups, width + 4 * i), dtype, i, 3.0).to(device)[..., :width]
        weight = random((groups, width), torch.float32 if i % 2 else dtype, i + 1).to(device)
        checked("rms_norm", input, weight, norm_eps=EPS, norm_weight_offset=float(i % 2))
        checked("rms_norm", input[0], weight, norm_eps=EPS)


def test_nan_stays_in_its_row(device):
    input = random((3, 40), torch.float16, 0).to(device)
    input[1, 7] = torch.nan
    infinite = input.clone()
    infinite[1, 7] = torch.inf
    for x in (input, infinite):
        for norm in (layer_norm, lambda x, *rest, **eps: fused_residual_layer_norm(x, x, *rest, **eps)[0]):
            result = norm(x, None, None, norm_eps=EPS)
            assert result[1].isnan().all() and result[[0, 2]].isfinite().all()
    result = rms_norm(input, None, norm_eps=EPS)
    assert result[1].isnan().all() and result[[0, 2]].isfinite().all()


def test_many_rows(device):
    """With hundreds of rows a thread takes more elements; the last threadgroup of short rows is not full."""
    for rows, width in ((9, 33), (258, 516), (258, 517)):
        residual, input = (random((rows, width), torch.float16, seed).to(device) for seed in range(2))
        check_all(residual, input, random((width,), torch.float32, 2).to(device), torch.ones(1).to(device))


def test_magnitudes(device):
    """Squares beyond the range of float16, a row of zeros, and an eps that decides."""
    for scale, eps in ((6e4, EPS), (0.0, EPS), (1e-4, 1e-2), (1e-4, 0.0)):
        input = torch.full((2, 96), scale, dtype=torch.float16, device=device)
        input[:, ::2] *= -1 if scale < 6e4 else -0.5
        residual = torch.zeros_like(input)
        if scale == 0.0:
            residual += 1.0
        ones = torch.ones(96, device=device)
        checked("fused_norm_add", residual, input, ones, norm_eps=eps)
        checked("fused_residual_norm", residual, input, ones, norm_eps=eps)


def test_norm_sees_the_rounded_sum(device):
    """256 + 1 is 256 in bfloat16. The weight puts the norm of 256 just below the middle between 0.5 and the
    next number, and that of 257 above it."""
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    input = torch.ones_like(residual)
    weight = torch.full((64,), 1 + 2.0**-8 - 2.0**-12, device=device)
    scalar = torch.full((1,), 2.0, device=device)
    eps = 3 * 256.0**2
    normed, carried = fused_residual_norm(residual, input, weight, norm_eps=eps)
    assert (exact(carried) == 256.0).all()
    assert (exact(normed) == 0.5).all()
    assert (exact(fused_residual_norm_scalar(residual, input, weight, scalar, norm_eps=eps)) == 1.0).all()


# The norm with a gate


def test_layer_norm_of_rows_far_from_zero(device):
    """Squares of the distance from the mean: E[x^2] - mean^2 would lose all of a small spread."""
    input = (random((4, 300), torch.float32, 0) * 1e-2 + 100.0).to(device)
    result = checked("layer_norm", input, None, None, norm_eps=1e-12)
    assert abs(exact(result).std(-1) - 1.0).max() < 1e-3
