"""Base class of drafters, and their view of a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..prefix_cache.memory import PrefixCache


@dataclass
class Acceptance:
    """Acceptance statistics of one drafter for one row.

    Attributes:
        accepted: mean accepted tokens per drafted step.
        steps: number of drafted steps.
        pause: steps to pause before the next try while drafting does not pay.
        waits: remaining steps of the pause.
    """

    accepted: float
    steps: int = 0
    pause: int = 1
    waits: int = 0


@dataclass(eq=False)
class DraftedSequence:
    """A sequence, as drafters see it.

    Attributes:
        tokens: prompt and generated tokens.
        prompt: number of prompt tokens.
        max_drafts: the maximum number of tokens to draft now.
        drafter: index of the drafter of the last draft tokens.
        acceptance: {drafter index: statistics}.
        failed: indices of drafters that raised for this sequence and are disabled for it.
    """

    tokens: list[int]
    prompt: int
    max_drafts: int = 0
    drafter: int = 0
    acceptance: dict[int, Acceptance] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


class Drafter(ABC):
    """Proposes draft tokens. They affect the speed of an answer, never its tokens.

    An exception disables a drafter for that row only.

    Attributes:
        is_cheap: True if drafting costs almost nothing: it is called in every step, even before the last
            token is known. Others are called only while drafting pays.
        states: indices of the target model's hidden states that `computed` gets; -1 is the last layer's.
        modules: further modules that it runs.
        layers: number of MTP layers of the checkpoint that it uses.
    """

    is_cheap = False
    states: tuple[int, ...] = ()
    modules: Sequence[nn.Module] = ()
    layers = 0

    @abstractmethod
    def draft(self, rows: Sequence[DraftedSequence]) -> Sequence[Sequence[int]]:
        """Draft tokens of each row, at most `row.max_drafts`, possibly none."""

    def accepted(self, rows: Sequence[DraftedSequence], counts: Sequence[int]) -> None:  # noqa: B027
        """Called with the number of accepted draft tokens of each row.

        They and the next token are in `row.tokens` by then.
        """

    def computed(self, row: DraftedSequence, first: int, states: Tensor) -> None:  # noqa: B027
        """Called with the target model's hidden states of a row's tokens, in order and without repetition.

        Args:
            first: position of the first token.
            states: the hidden states listed in the attribute `states`, concatenated to [1, T, H].
        """

    def left(self, row: DraftedSequence) -> None:  # noqa: B027
        """Called when a row's answer has ended, except after a fault that ends all."""

    def held(self, row: DraftedSequence) -> int:
        """Bytes held for a row."""
        return 0

    def shrink(self, memory: int) -> int:
        """Shrinks the drafter's prefix cache to at most `memory` bytes. Returns: its size."""
        return 0


class DrafterState(Protocol):
    """A drafter's state for one row."""

    def memory(self) -> int:
        """Size in bytes."""


R = TypeVar("R", bound=DrafterState)


class RowDrafter(Drafter, Generic[R]):
    """A drafter that handles rows one after the other, with a separate cache for each."""

    def __init__(self, memory: int = 0) -> None:
        self._read: WeakKeyDictionary[DraftedSequence, R] = WeakKeyDictionary()
        self.prompts = PrefixCache(memory)

    @torch.no_grad()
    def draft(self, rows: Sequence[DraftedSequence]) -> list[list[int]]:
        return [self._of(row) if row.max_drafts else [] for row in rows]

    @abstractmethod
    def _of(self, row: DraftedSequence) -> list[int]:
        """Draft tokens of one row, at most `row.max_drafts`."""

    def held(self, row: DraftedSequence) -> int:
        read = self._read.get(row)
        return 0 if read is None else read.memory()

    def shrink(self, memory: int) -> int:
        self.prompts.shrink(memory)
        return self.prompts.nbytes
