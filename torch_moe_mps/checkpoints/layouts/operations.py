"""Operations of transformers' converters that are functions of tensors, each with its reverse."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.upstream.weights import ConversionOps
from ...quantization import repack_mxfp4_blocks

Function = Callable[[list[Tensor]], Sequence[Tensor]]


def only(tensor: Tensor | list[Tensor]) -> Tensor:
    """A tensor as transformers passes it on, alone or in a list."""
    return tensor[0] if isinstance(tensor, list) else tensor


class Operation(ConversionOps):
    """A function of a converter's tensors in the order of their names; without a reverse, it only reads.

    The results get the names of the converter's targets if there are as many, else the tensors' names:
    another operation joins them, or has split them.

    Attributes:
        keeps_bytes: whether the results are the tensors' bytes, in other shapes.
    """

    hf_quantizer = True  # transformers leaves the dtype as it is stored
    keeps_bytes = False

    def __init__(self, function: Function, reverse: Function | None = None):
        self.function, self.reverse = function, reverse

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        """The results by the target names, or by the sources' where their number is another."""
        names = [name for name in source_patterns if name in input_dict] or [*input_dict]
        results = self.function([only(input_dict[name]) for name in names])
        return dict(
            zip(target_patterns if len(results) == len(target_patterns) else names, results, strict=True)
        )

    @property
    def reverse_op(self) -> "Operation":
        assert self.reverse is not None
        return Operation(self.reverse, self.function)


def each(function: Callable[[Tensor], Tensor], reverse: Callable[[Tensor], Tensor]) -> Operation:
    return Operation(lambda tensors: [*map(function, tensors)], lambda tensors: [*map(reverse, tensors)])


def packed_blocks() -> Operation:
    """MXFP4 blocks as gpt-oss has them [E, R, C / 32, 16] as packed codes [E, R, C / 8]: the same bits."""

    def pack(blocks: Tensor) -> Tensor:
        # The scales are a parameter of their own; here they only say which shape the blocks must have.
        return repack_mxfp4_blocks(blocks, scales=blocks[..., 0]).packed.view(torch.int32)

    result = each(pack, lambda packed: packed.view(torch.uint8).unflatten(-1, (-1, 16)))
    result.keeps_bytes = True
    return result
