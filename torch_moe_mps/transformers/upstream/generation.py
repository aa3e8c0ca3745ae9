"""Parts of `generate`, and arguments that some models' own ones need."""

from typing import Any

from transformers.generation import (
    GenerationMixin,
    GenerationMode,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

__all__ = [
    "GenerationMixin",
    "GenerationMode",
    "LogitsProcessorList",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "as_text",
]


def as_text(model: Any) -> dict[str, Any]:
    """Arguments by which a model that also speaks answers in text alone."""
    return {"generation_mode": "text"} if hasattr(model, "has_talker") else {}
