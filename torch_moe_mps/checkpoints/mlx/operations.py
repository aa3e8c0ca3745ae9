"""Operations between tensors of MLX and parameters.

Joining, interleaving and transposing are operations that transformers has.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...quantization import Format, QuantizedWeight, dequantize
from ..layouts.operations import Operation, each
from ..quantize.weights import as_int32


def as_uint32(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint32) if tensor.dtype == torch.int32 else tensor


def as_stored() -> Operation:
    """Operation that leaves packed codes, scales and biases as MLX has them, but for uint32."""
    return each(as_int32, as_uint32)


def joined_stacks(count: int, matrices: Sequence[Tensor]) -> Tensor:
    """One stack [count, ., .] of matrices of several stacks, one behind the other, joined by rows."""
    stacks = [torch.stack([*matrices[first : first + count]]) for first in range(0, len(matrices), count)]
    return torch.cat(stacks, 1)


def stacked(count: int, stacks: int) -> Operation:
    """Operation that stacks matrices which are tensors of their own: `stacks` stacks of `count`."""
    return Operation(
        lambda matrices: [joined_stacks(count, matrices)],
        lambda whole: [matrix for stack in whole[0].chunk(stacks, 1) for matrix in stack.unbind()],
    )


def one_less() -> Operation:
    return each(lambda tensor: tensor - 1, lambda tensor: tensor + 1)


def dequantized(
    formats: Sequence[Format | None], join: Callable[[list[Tensor]], Tensor], split: Any = None
) -> Operation:
    """Operation that makes a dense parameter of matrices that may be quantised.

    Args:
        formats: of each matrix; None is dense.
        join: the parameter made of the dense matrices.
        split: the reverse.
    """
    return Operation(lambda tensors: [join([*_matrices(formats, iter(tensors))])], split)


def _matrices(formats: Sequence[Format | None], rest: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yields a dense matrix for each format, from one tensor for None, else from its packed parts."""
    for format in formats:
        if format is None:
            yield next(rest)
        else:
            packed, scales = next(rest), next(rest)
            biases = next(rest) if format.has_zeros else None
            yield dequantize(QuantizedWeight(packed, scales, biases, format))


def halves(formats: Sequence[Format | None], heads: int, nope: int, format: Format | None) -> Operation:
    """embed_q [heads, rank, nope] and unembed_out [heads, v, rank] -> kv_b_proj [heads * (nope + v), rank].

    Args:
        formats: of both in MLX.
        heads, nope: sizes of kv_b_proj.
        format: of kv_b_proj, to write it. embed_q is transposed, so it is dequantised.
    """

    def join(both: list[Tensor]) -> Tensor:
        return torch.cat((both[0].mT, both[1]), 1).flatten(0, 1).contiguous()

    def split(tensors: list[Tensor]) -> list[Tensor]:
        rows = [tensor.detach().unflatten(0, (heads, -1)) for tensor in tensors]
        q, v = [tensor[:, :nope].contiguous() for tensor in rows], [tensor[:, nope:] for tensor in rows]
        (dense,) = _matrices([format], iter(q))
        return [dense.mT, *map(as_uint32, v)]

    return dequantized(formats, join, split)
