"""Formats of quantised weights: tensors only, nothing of models."""

from ..ops._formats import Format
from .formats import (
    QuantizedWeight,
    dequantize,
    quantize,
    repack_mxfp4_blocks,
    requested_format,
)

__all__ = [
    "Format",
    "QuantizedWeight",
    "dequantize",
    "quantize",
    "repack_mxfp4_blocks",
    "requested_format",
]
