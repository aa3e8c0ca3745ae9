"""Assistants that draft a block of tokens."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

__all__ = ["DFlashCache", "block_embedding"]


def block_embedding(embedding: Any, ids: Tensor) -> Tensor:
    """A model's embedding of a block's tokens, without the norm that some have there."""
    holder: Any = SimpleNamespace(main_model_input_embeddings=embedding)
    embedded: Tensor = DFlashTokenCandidateGenerator._get_noise_embeds(holder, ids)
    return embedded
