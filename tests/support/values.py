"""Random numbers of the dtypes that activations have."""

import torch
from torch import Tensor

from support.sweep import in_sweep

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Parameters of a test: kernels are instances of one template, each costs a compilation in each dtype, and an
# error is most visible in float32. Tests of rounding, and of WITH_16_BITS, run in 16 bits always.
EACH_DTYPE = in_sweep(DTYPES, [torch.float32])


def random(shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Other ones for another shape."""
    return random(shape, dtype, seed + sum(shape), scale)


def far_apart(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with neighbours in a dimension over 2^32 elements apart: no page between them exists."""
    strides = list(tensor.contiguous().stride())
    strides[dim] = 2**32 + tensor.numel()
    memory = torch.empty(
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)),
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def awkward_weights(dtype):
    """Odd counts of experts and rows; zero, constant, one-signed, tiny and huge groups, and ties."""
    weight = torch.randn(3, 17, 256, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    weight[0, 1], weight[0, 2] = 1.5, -0.3
    weight[0, 3], weight[0, 4] = weight[0, 3].abs(), -weight[0, 4].abs()
    weight[0, 5] *= 1e-6
    weight[0, 6] = weight[0, 6].clamp(-2, 2) * 3e4
    weight[0, 7] = torch.randint(-24, 25, (256,), generator=torch.Generator().manual_seed(1)) * 0.25
    weight[0, 8] *= 1e-9
    weight[0, 9, ::7] = 40
    weight[0, 10] = torch.where(weight[0, 10] > 0, 1.0, -1.0)
    weight[1] *= torch.exp2(torch.arange(17.0) - 12)[:, None]
    if dtype != torch.float16:
        weight[0, 11] *= 1e30
        weight[0, 12] *= 1e-30
    return weight.to(dtype)
