"""Frequency and presence penalties of OpenAI's protocols."""

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Subtracts `frequency` per occurrence of a token in the answer, and `presence` once, from its logit.

    Args:
        prompt: number of prompt tokens.
    """

    def __init__(self, prompt: int, frequency: float, presence: float):
        self._prompt, self._frequency, self._presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self._prompt :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
