"""RMSNorm and LayerNorm, alone and fused with the residual stream."""

import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_operators import checked
from support.values import EACH_DTYPE, random

from torch_moe_mps.ops.families.norms import (
    fused_residual_layer_norm,
    fused_residual_norm,
    fused_residual_norm_scalar,
    layer_norm,
    rms_norm,
    rms_norm_gated,
)

EPS = 1e-6
# The sum of squares, the root and the products, each rounded once or twice.
FLOAT32_ERRORS = 12


def check_all(residual, input, weight, scalar, eps=EPS, weight_offset=0.0):
    """The operators on these tensors."""
    options = {"eps": eps, "weight_offset": weight_offset}
    checked("rms_norm", input, weight, **options)
    checked("rms_norm", input, None, eps, factor=0.22)
    checked("layer_norm", input, weight, weight.flip(0), **options)
    checked("layer_norm", input, None, None, eps)
    checked("fused_residual_layer_norm", residual, input, weight, weight.flip(0), **options)
    checked("fused_residual_layer_norm", residual, input, None, weight, eps)
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
        checked("rms_norm", input, weight, EPS, float(i % 2))
        checked("rms_norm", input[0], weight, EPS)


def model_norms():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    yield Qwen3MoeRMSNorm, {}, 0.0
    yield GptOssRMSNorm, {}, 0.0
    yield Qwen3NextRMSNorm, {}, 1.0
    yield Gemma4RMSNorm, {"with_scale": False}, 0.0
    yield Gemma4RMSNorm, {}, 0.0


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_norms_of_models(device, dtype):
    """Those that round the normed row before they multiply it, too: 2 ulp apart at most."""
    for i, (norm, options, offset) in enumerate(model_norms()):
        module = norm(80, eps=EPS, **options).to(dtype)
        weight = getattr(module, "weight", None)
        if weight is not None:
            weight = torch.nn.Parameter(random((80,), dtype, i), requires_grad=False)
            module.weight = weight
        x = random((7, 80), dtype, 20 + i, 3.0)
        expected = exact(module(x))
        actual = exact(rms_norm(x.to(device), None if weight is None else weight.to(device), EPS, offset))
        allowed = 2 * spacing(expected, dtype) + FLOAT32_ERRORS * FLOAT32_EPS * abs(expected)
        assert (abs(actual - expected) <= allowed).all(), norm.__name__


def test_nan_stays_in_its_row(device):
    input = random((3, 40), torch.float16, 0).to(device)
    input[1, 7] = torch.nan
    infinite = input.clone()
    infinite[1, 7] = torch.inf
    for x in (input, infinite):
        for norm in (layer_norm, lambda x, *rest: fused_residual_layer_norm(x, x, *rest)[0]):
            result = norm(x, None, None, EPS)
            assert result[1].isnan().all() and result[[0, 2]].isfinite().all()
    result = rms_norm(input, None, EPS)
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
        checked("fused_norm_add", residual, input, ones, eps)
        checked("fused_residual_norm", residual, input, ones, eps)


def test_norm_sees_the_rounded_sum(device):
    """256 + 1 is 256 in bfloat16. The weight puts the norm of 256 just below the middle between 0.5 and the
    next number, and that of 257 above it."""
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    input = torch.ones_like(residual)
    weight = torch.full((64,), 1 + 2.0**-8 - 2.0**-12, device=device)
    scalar = torch.full((1,), 2.0, device=device)
    eps = 3 * 256.0**2
    normed, carried = fused_residual_norm(residual, input, weight, eps)
    assert (exact(carried) == 256.0).all()
    assert (exact(normed) == 0.5).all()
    assert (exact(fused_residual_norm_scalar(residual, input, weight, scalar, eps)) == 1.0).all()


# The norm with a gate


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_gated_norm_of_qwen3_next(device, dtype):
    """The model rounds the normed row, its product with the weight and the result: 3 ulp apart at most."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(128, EPS).to(dtype)
    norm.weight = torch.nn.Parameter(random((128,), dtype, 3), requires_grad=False)
    x, z = (random((5, 128), dtype, seed) for seed in range(2))
    model = exact(norm(x, z))
    ours = exact(rms_norm_gated(*(t.to(device) for t in (x, z, norm.weight)), EPS))
    assert (abs(ours - model) <= 3 * spacing(model, dtype) + FLOAT32_ERRORS * FLOAT32_EPS * abs(model)).all()


def test_layer_norm_of_rows_far_from_zero(device):
    """Squares of the distance from the mean: E[x^2] - mean^2 would lose all of a small spread."""
    input = (random((4, 300), torch.float32, 0) * 1e-2 + 100.0).to(device)
    result = checked("layer_norm", input, None, None, 1e-12)
    assert abs(exact(result).std(-1) - 1.0).max() < 1e-3
