"""Groups: decoding sequences that share a cache. A sequence that is not batchable is a group of one."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...models.programs import BatchedCache
from .sampling import Sampled
from .sequence import Sequence


class Group(ABC):
    """Sequences that share a cache and decode in one model call.

    Attributes:
        sequences: by row.
        sampled: tokens of the last step that the host has not read; None if it has.
    """

    is_batched = False

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.sampled: Sampled | None = None

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Number of cached tokens of each sequence."""

    @abstractmethod
    def copy_of(self, sequence: Sequence) -> Any:
        """Independent cache of one sequence."""

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence; the last row takes its place."""
        row = self.sequences.index(sequence)
        if self.sampled is not None:
            self.sampled.leave(row)
        self.sequences[row] = self.sequences[-1]
        self.sequences.pop()
        sequence.is_batched = False

    def computed(self, sequence: Sequence) -> list[int]:
        """Generated tokens of a sequence that are in the cache."""
        count = self.lengths[self.sequences.index(sequence)] - sequence.prompt_tokens
        return sequence.tokens[: max(0, count)]

    def next_tokens(self, device: torch.device) -> Tensor:
        """Last token [B, 1] of each sequence, on the device."""
        if self.sampled is not None:
            return self.sampled.inputs()
        return torch.tensor([[each.tokens[-1]] for each in self.sequences]).to(device)


class BatchedGroup(Group):
    """Sequences batched as rows of one cache."""

    is_batched = True

    def __init__(self, rows: BatchedCache):
        super().__init__()
        self.rows = rows

    @property
    def lengths(self) -> list[int]:
        return self.rows.lengths

    def join(self, sequence: Sequence) -> None:
        """Adds a sequence as the last row by copying its cache. Raises: NotBatchable."""
        prefill = sequence.prefill
        assert prefill is not None
        self.rows.admit(prefill.cached.cache, len(prefill.cached.ids), prefill.moved)
        self.sequences.append(sequence)
        sequence.is_batched = True

    def copy_of(self, sequence: Sequence) -> Any:
        return self.rows.alone(self.sequences.index(sequence))

    def leave(self, sequence: Sequence) -> None:
        self.rows.finish(self.sequences.index(sequence))
        super().leave(sequence)


class Single(Group):
    """A sequence that decodes alone, in its prefill cache.

    Attributes:
        prefill: owns the cache.
        length: number of cached tokens.
    """

    def __init__(self, sequence: Sequence):
        super().__init__()
        assert sequence.prefill is not None
        self.sequences, self.prefill = [sequence], sequence.prefill
        self.length = len(self.prefill.cached.ids)

    @property
    def lengths(self) -> list[int]:
        return [self.length]

    def copy_of(self, sequence: Sequence) -> Any:
        return self.prefill.cached.cache  # nobody else's
