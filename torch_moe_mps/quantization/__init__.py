"""Formats of quantised weights: tensors only, nothing of models."""

from .formats import (
    QuantizationFormat,
    QuantizedWeight,
    dequantize,
    quantize,
    relative_error,
    repack_mxfp4_blocks,
    requested_format,
)

__all__ = [
    "QuantizationFormat",
    "QuantizedWeight",
    "dequantize",
    "quantize",
    "relative_error",
    "repack_mxfp4_blocks",
    "requested_format",
]
