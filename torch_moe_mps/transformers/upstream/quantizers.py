"""Quantisers of the loader, and their configs."""

from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import GgufConfig, QuantizationConfigMixin

__all__ = [
    "AUTO_QUANTIZER_MAPPING",
    "AutoHfQuantizer",
    "AutoQuantizationConfig",
    "GgufConfig",
    "HfQuantizer",
    "QuantizationConfigMixin",
    "register_quantization_config",
    "register_quantizer",
]
