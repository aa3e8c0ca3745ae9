"""Names of transformers, PEFT, TRL and gguf that a release may change; other rooms have them from here.

`from ..upstream import NAME` imports a name of `_ON_USE` on first use: its module is slow to import, or
not in every release.
"""

import importlib
from typing import Any

_ON_USE = {
    "DFlashCache": "cache_utils",
    "DFlashTokenCandidateGenerator": "generation.candidate_generator",
    "GradientCheckpointingLayer": "modeling_layers",
    "LogitsProcessorList": "generation",
    "MTPCandidateGenerator": "generation.candidate_generator",
    "MinPLogitsWarper": "generation",
    "MtpCache": "cache_utils",
    "MtpModel": "modeling_layers",
    "TemperatureLogitsWarper": "generation",
    "TopKLogitsWarper": "generation",
    "TopPLogitsWarper": "generation",
    "bytes_to_unicode": "convert_slow_tokenizer",
}
_MODULES = ("modeling_gguf_pytorch_utils",)  # imports tokenizers


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"transformers.{name}")
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"transformers.{_ON_USE[name]}"), name)
