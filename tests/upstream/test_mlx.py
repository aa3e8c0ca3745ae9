"""MLX's quantised products, and their gradients, are those of the operators."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from support.expert_layers import random_ids
from support.oracles_experts import numbers_of
from support.quantized_layers import FORMATS, each, place
from support.values import random
from torch import Tensor

from torch_moe_mps.ops import embedding_quantized, expert_qmm, linear_quantized
from torch_moe_mps.ops._formats import Format
from torch_moe_mps.ops._sample import Sample

# -1 and 8 would be no experts.
IDS = torch.tensor([[0, 7], [3, 7], [5, 3], [0, 3], [0, 3]])


@pytest.mark.parametrize("format", ["affine4_64", "affine6_32", "mxfp8", "nvfp4"])
def test_linear_layers_and_embeddings_of_mlx(format):
    """quantized_matmul and dequantize on MLX's own weights."""
    bits, group_size, mode = numbers_of(format)
    options = {"group_size": group_size, "bits": bits, "mode": mode}
    dense_weight, x = random((40, 256), torch.float32, 0), random((5, 256), torch.float32, 1)
    with mx.stream(mx.cpu):
        parts = mx.quantize(mx.array(dense_weight.numpy()), **options)
        expected = np.array(mx.quantized_matmul(mx.array(x.numpy()), *parts, transpose=True, **options))
        rows = np.array(mx.dequantize(*parts, dtype=mx.float32, **options))
        packed, *scales = [torch.from_numpy(np.array(part)) for part in parts]
    weight = (packed, scales[0], scales[1] if mode == "affine" else None)
    assert np.allclose(linear_quantized(x, *weight, format=format), expected, rtol=1e-4, atol=1e-4)
    embedded = embedding_quantized(torch.arange(40), *weight, format=format, dtype=torch.float32)
    assert np.allclose(embedded, rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", each(FORMATS))
def test_experts_of_mlx(device, format):
    """What MLX's own quantised weights give in MLX's own gather_qmm, in float32 on the CPU."""
    bits, group_size, mode = numbers_of(format)
    tokens, slots, experts, rows, hidden = 6, 2, 5, 48, 256
    keywords = {"group_size": group_size, "bits": bits, "mode": mode}
    x, ids = random((tokens, hidden), torch.float32, 0), random_ids(tokens, slots, experts, 1, torch.int32)
    with mx.stream(mx.cpu):
        weight = mx.array(random((experts, rows, hidden), torch.float32, 2).numpy())
        packed, scales, *zeros = mx.quantize(weight, **keywords)
        out = mx.gather_qmm(
            mx.array(x.numpy())[:, None, None],
            packed,
            scales,
            zeros[0] if zeros else None,
            rhs_indices=mx.array(ids.numpy()),
            transpose=True,
            **keywords,
        )
        expected = np.array(out)[:, :, 0]
    packed = torch.from_numpy(np.array(packed).view(np.int32))
    scales, zeros = (
        torch.from_numpy(np.array(scales)),
        torch.from_numpy(np.array(zeros[0])) if zeros else None,
    )
    placed = place((packed.view(torch.uint32), scales, zeros), device)
    result = expert_qmm(x.to(device), ids.to(device), *placed, format=format)
    torch.testing.assert_close(result.cpu(), torch.from_numpy(expected), rtol=1e-5, atol=1e-4)


def as_mlx(tensor: Tensor) -> mx.array:
    return mx.array(tensor.numpy().view(np.uint32) if tensor.dtype == torch.int32 else tensor.numpy())


@pytest.mark.parametrize("ids", [None, IDS], ids=["quantized_matmul", "gather_qmm"])
def test_gradients_of_mlx(ids):
    form = "affine4_32"
    s = Sample("cpu", torch.float32, format=Format.named(form), tokens=5)
    weight = s.quantized("", s.I, s.H, () if ids is None else (s.E,))
    x, options = s.values(5, s.H), {"transpose": True, "group_size": 32, "bits": 4}
    arrays = [as_mlx(tensor) for tensor in weight.values()]

    def theirs(rows: mx.array) -> mx.array:
        if ids is None:
            return mx.quantized_matmul(rows, *arrays, **options)
        slots = mx.gather_qmm(rows[:, None, None], *arrays, rhs_indices=mx.array(ids.numpy()), **options)
        return slots.squeeze(-2)

    leaf = x.clone().requires_grad_()
    if ids is None:
        out = linear_quantized(leaf, *weight.values(), format=form)
    else:
        out = expert_qmm(leaf, ids, *weight.values(), format=form)
    dy = s.values(*out.shape)
    out.backward(dy)
    _, (right,) = mx.vjp(theirs, [as_mlx(x)], [as_mlx(dy)])
    right = torch.from_numpy(np.array(right))
    assert (leaf.grad - right).norm() <= 5e-6 * right.norm()
