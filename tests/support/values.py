"""Random numbers of the dtypes that activations have."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random(shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Other ones for another shape."""
    return random(shape, dtype, seed + sum(shape), scale)
