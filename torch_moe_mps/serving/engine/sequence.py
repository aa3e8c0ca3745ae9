"""A sequence: the state of one job in the engine."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..prefix_cache.disk import Restoring
from .drafter import DraftedSequence
from .job import Job, prompt_length
from .prefill import Prefill
from .sampling import Sampler

Phase = Literal["waiting", "restoring", "prefill", "decoding", "ended"]


@dataclass(eq=False)
class Sequence:
    """State of one job: its phase, prefill, and generated tokens.

    Attributes:
        phase: "waiting" to be admitted, for the first time or preempted; "restoring" its prefix from the
            disk; "prefill"; "decoding"; or "ended".
        turn: its admission turn.
        restoring: reads its prefix from the disk, in that phase.
        prefill: of its prompt; owns the cache. None before admission.
        tokens: generated tokens that the host has read.
        is_batched: True if it decodes in the batch.
        row: its token history for the drafters, if any.
    """

    job: Job
    phase: Phase = "waiting"
    turn: int = 0
    restoring: Restoring | None = None
    sampler: Sampler | None = None
    prefill: Prefill | None = None
    tokens: list[int] = field(default_factory=list)
    is_batched: bool = False
    row: DraftedSequence | None = None

    @property
    def place(self) -> int:
        """Index among the answers to one request."""
        return self.job.place

    @property
    def request(self) -> object:
        return self.job.request

    @property
    def prompt_tokens(self) -> int:
        return prompt_length(self.job.inputs)

    @property
    def has_begun(self) -> bool:
        """True once it was admitted, even if it was preempted since."""
        return self.prefill is not None or self.phase == "decoding"

    @property
    def length(self) -> int:
        """Upper bound of its number of tokens, cached and uncomputed."""
        return 0 if self.prefill is None else len(self.prefill.cached.ids) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum number of generated tokens."""
        assert self.sampler is not None
        return self.sampler.max_tokens

    def computed_ids(self) -> Tensor:
        """Prompt and generated tokens [1, T] in the cache before the next step."""
        prompt = self.job.inputs["input_ids"]
        return torch.cat((prompt, prompt.new_tensor([self.tokens[:-1]])), 1)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.row is not None:
            self.row.tokens.append(token)
