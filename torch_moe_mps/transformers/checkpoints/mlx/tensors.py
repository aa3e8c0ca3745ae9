"""Makes parameters of a model from tensors of MLX: joins their words, or dequantises them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....quantization import Format, dequantize
from ..weights import words


def rows(*tensors: Tensor) -> Tensor:
    """Concatenates the rows of matrices that have equally many columns."""
    return words(tensors[0]) if len(tensors) == 1 else torch.cat([words(tensor) for tensor in tensors])


def dense_rows(formats: Sequence[Format], tensors: Sequence[Tensor]) -> Tensor:
    """Dequantises matrices and concatenates their rows; `tensors` are those of all matrices in order."""
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
    """Joins the rows of gate and up of every expert, concatenated or interleaved."""
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
