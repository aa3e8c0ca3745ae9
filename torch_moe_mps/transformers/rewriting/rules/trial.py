"""How functions and modules are recognised that run on random numbers."""

import torch
from torch import Tensor


def agrees(a: object, b: object, rtol: float = 1e-5) -> bool:
    """Whether two results are tensors that are equal up to rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol, 1e-5)
