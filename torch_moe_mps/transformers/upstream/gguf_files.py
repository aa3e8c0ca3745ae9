"""Readers of GGUF files."""

from transformers.integrations import gguf
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported, reader
from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS
from transformers.integrations.gguf.kernels import get_gguf_kernel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

__all__ = [
    "CONFIG_MAPPING",
    "DENSE_DECODER_RENAMINGS",
    "GGUF_CONFIG_MAPPING",
    "GgufHfQuantizer",
    "get_gguf_conversion_mapping",
    "get_gguf_kernel",
    "gguf",
    "is_gguf_arch_supported",
    "reader",
]
