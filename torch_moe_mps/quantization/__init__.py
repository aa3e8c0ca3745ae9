"""Formats of quantised weights: tensors only, nothing of models."""

from ..ops._formats import TENSORS, Format, QuantizedWeight
from .formats import (
    dequantize,
    quantize,
    repack_mxfp4_blocks,
    requested_format,
)

__all__ = [
    "TENSORS",
    "Format",
    "QuantizedWeight",
    "dequantize",
    "quantize",
    "repack_mxfp4_blocks",
    "requested_format",
]
