"""MXFP4 blocks as gpt-oss stores them, read as packed words and written back."""

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from ...quantization import repack_mxfp4_blocks


def only(tensors: dict[str, Tensor | list[Tensor]]) -> Tensor:
    (value,) = tensors.values()
    return value[0] if isinstance(value, list) else value


class RepackBlocks(ConversionOps):
    """Bytes [E, R, C / 32, 16] -> words [E, R, C / 8]: the same bits."""

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        blocks = only(input_dict)
        # The scales are a parameter of their own; here they only say which shape the blocks must have.
        packed = repack_mxfp4_blocks(blocks, scales=blocks[..., 0]).packed
        return {target_patterns[0]: packed.view(torch.int32)}

    @property
    def reverse_op(self) -> ConversionOps:
        return WriteBlocks()


class WriteBlocks(ConversionOps):
    """Words back to bytes, for saving what was loaded from blocks."""

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        packed = only(input_dict)
        return {target_patterns[0]: packed.view(torch.uint8).unflatten(-1, (-1, 16))}

    @property
    def reverse_op(self) -> ConversionOps:
        return RepackBlocks()
