"""Batched products of torch's with many terms, which some GPUs sum wrongly.

On M1 and M2, a product of TERMS terms and more, with at least ROWS rows and columns, also sums what lies in
memory after its operands (pytorch#195163, #195012). Eager attention of a prompt has a term for each key.
"""

import functools
import warnings

import torch
from torch import Tensor

TERMS, ROWS = 32_767, 16
_SUMMED = TERMS + 32  # the end of a tile of terms may hide it
_BEHIND = 4096  # elements after each operand; zeros would hide it, too


def operands() -> tuple[Tensor, Tensor]:
    """Flat memory of two matrices, and of what lies after them."""
    generator = torch.Generator().manual_seed(11)
    first, second = (torch.randn(ROWS * _SUMMED + _BEHIND, generator=generator) for _ in range(2))
    first[ROWS * _SUMMED :] = second[ROWS * _SUMMED :] = 100.0
    return first, second


def product(first: Tensor, second: Tensor) -> Tensor:
    """The product [1, ROWS, ROWS] of two matrices in such memory."""
    size = ROWS * _SUMMED
    return torch.bmm(first[:size].view(1, ROWS, _SUMMED), second[:size].view(1, _SUMMED, ROWS))


@functools.cache
def is_wrong() -> bool:
    """True if this machine's GPU sums such a product wrongly."""
    matrices = operands()
    expected, got = product(*matrices), product(*(matrix.to("mps") for matrix in matrices)).cpu()
    return not float((got - expected).abs().max()) <= 1e-2 * float(expected.abs().max())


@functools.cache
def warn_of_eager_attention(model: str) -> None:
    """Warns once that a model's outputs for a long prompt are wrong, if they are."""
    if is_wrong():
        warnings.warn(
            f"torch_moe_mps: the eager attention of {model} has {TERMS:,} keys or more, for which torch's "
            "batched products are wrong on this GPU (pytorch#195163): so are the model's outputs. Load it "
            'with attn_implementation="sdpa"',
            stacklevel=2,
        )
