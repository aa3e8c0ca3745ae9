"""Parts of `generate`."""

from transformers.generation import (
    GenerationMixin,
    GenerationMode,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator

__all__ = [
    "AssistedCandidateGenerator",
    "GenerationMixin",
    "GenerationMode",
    "LogitsProcessorList",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
]
