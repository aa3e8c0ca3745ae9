"""A sequence: one job on its way through the engine."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..prefix_cache.disk import Restoring
from ..speculative.drafter import Row
from .job import Job, prompt_length
from .prefill import Prefill
from .sampling import Sampler

Phase = Literal["waiting", "restoring", "prefill", "decoding", "ended"]


@dataclass(eq=False)
class Sequence:
    """The prompt and the tokens of a job.

    Attributes:
        alone: why the model's own `generate` must generate it, for a person; None where the engine does.
        phase: "waiting" to be admitted, for the first time or preempted; "restoring" its prefix from the
            disk; "prefill"; "decoding"; or "ended".
        turn: its round of admissions.
        restoring: the read of its prefix, in that phase.
        prefill: of its prompt; it has the cache. None before it is admitted.
        tokens: generated, as far as the host has read them.
        is_batched: whether it decodes in a batch with others.
        row: its tokens for the drafters, if there are any.
    """

    job: Job
    alone: str | None = None
    phase: Phase = "waiting"
    turn: int = 0
    restoring: Restoring | None = None
    sampler: Sampler | None = None
    prefill: Prefill | None = None
    tokens: list[int] = field(default_factory=list)
    is_batched: bool = False
    row: Row | None = None

    @property
    def place(self) -> int:
        """Its number among the answers to one request."""
        return self.job.place

    @property
    def request(self) -> object:
        return self.job.request

    @property
    def prompt_tokens(self) -> int:
        return prompt_length(self.job.inputs)

    @property
    def has_begun(self) -> bool:
        """Whether it was admitted; a preempted sequence waits again, and was."""
        return self.prefill is not None or self.phase == "decoding"

    @property
    def length(self) -> int:
        """Tokens of its cache and behind it, at most."""
        return 0 if self.prefill is None else len(self.prefill.cached.ids) + len(self.tokens)

    @property
    def most(self) -> int:
        """How many tokens it may generate."""
        assert self.sampler is not None
        return self.sampler.most

    def computed_ids(self) -> Tensor:
        """The tokens [1, T] that are in the cache before the next step."""
        prompt = self.job.inputs["input_ids"]
        return torch.cat((prompt, prompt.new_tensor([self.tokens[:-1]])), 1)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.row is not None:
            self.row.tokens.append(token)
