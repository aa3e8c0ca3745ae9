"""Tensors of MLX as those of a model: its words, and what has to be dequantised."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....quantization import Format, dequantize
from ..weights import words


def rows(*tensors: Tensor) -> Tensor:
    """The rows of matrices with the same columns, one after the other."""
    return words(tensors[0]) if len(tensors) == 1 else torch.cat([words(tensor) for tensor in tensors])


def dense_rows(formats: Sequence[Format], tensors: Sequence[Tensor]) -> Tensor:
    """The rows of dequantised matrices, which have as many tensors as their formats need."""
    return torch.cat([*_dequantized(formats, tensors)])


def _dequantized(formats: Sequence[Format | None], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    rest = iter(tensors)
    for format in formats:
        if format is None:
            yield next(rest)
        else:
            packed, scales = next(rest), next(rest)
            biases = next(rest) if format.mode == "affine" else None
            yield dequantize(packed, scales, biases, **format.to_dict())


def joined(tensors: Sequence[Tensor], interleaved: bool, transposed: bool) -> Tensor:
    """The rows of gate and up, one after the other or in turns, of every expert."""
    tensors = [words(tensor) for tensor in tensors]
    if len(tensors) == 1:
        (rows,) = tensors
    elif interleaved:
        rows = torch.stack(tensors, 2).flatten(1, 2)
    else:
        rows = torch.cat(tensors, 1)
    return rows.mT.contiguous() if transposed else rows


def kv_b(formats: Sequence[Format | None], tensors: Sequence[Tensor]) -> Tensor:
    """embed_q [heads, rank, nope], unembed_out [heads, v, rank] -> [heads * (nope + v), rank]."""
    q, v = _dequantized(formats, tensors)
    return torch.cat((q.mT, v), 1).flatten(0, 1).contiguous()
