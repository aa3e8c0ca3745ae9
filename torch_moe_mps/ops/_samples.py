"""One good call of every operator, and more of some: arguments by name.

The tests of all operators and the self-check use them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import (
    attention,
    combine,
    experts,
    heads,
    hyper_connection,
    index,
    linear,
    linear_attention,
    norms,
    pointwise,
    pooling,
    quantized,
    rope,
    routing,
)
from ._formats import Format
from ._sample import FORMAT, HEAD, Calls, Changes, Sample, T

_FAMILIES: tuple[Any, ...] = (
    norms,
    rope,
    linear_attention,
    attention,
    index,
    pooling,
    pointwise,
    hyper_connection,
    routing,
    combine,
    experts,
    heads,
    quantized,
    linear,
)
CALLS: Calls = {name: call for family in _FAMILIES for name, call in family.CALLS.items()}
_CHANGES: Changes = {name: make for family in _FAMILIES for name, make in family.CHANGES.items()}
# The arguments whose last dimensions are those of a head; of keys and values in 8 bits: words of four.
OF_HEADS = {
    "attention": ("q", "v"),
    "rope": ("q", "q"),
    "rope_cache_": ("q", "v"),
    "index_keys_": ("k", "k"),
    "linear_attention_": ("q", "v"),
    "write_cache_quantized_": ("states", "states"),
}


def packet(name: str) -> Callable:
    return getattr(torch.ops.moe_mps, name)


def sample_arguments(
    name: str,
    device: str,
    dtype: torch.dtype,
    format: Format = FORMAT,
    tokens: int = T,
    wider: int = 1,
    head: tuple[int, int] = HEAD,
) -> dict[str, Any]:
    """Valid arguments of an operator. The sizes are those of Sample."""
    return CALLS[name](Sample(device, dtype, format, tokens, wider, head))


def more_samples(
    name: str, device: str, dtype: torch.dtype, head: tuple[int, int] = HEAD
) -> list[dict[str, Any]]:
    """Changes to the valid arguments that lead to other paths of the operator."""
    return _CHANGES[name](Sample(device, dtype, head=head, seed=1)) if name in _CHANGES else []


def copies(arguments: dict) -> dict:
    """Fresh tensors with the same strides, for operators that write."""
    return {
        name: value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
