"""The base class of drafters, and the sequences that they draft for."""

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
    """Acceptance of a drafter's tokens, for a row.

    Attributes:
        accepted: the mean of the last steps that had some.
        steps: how many those are.
        pause: steps without drafts in front of the next try, where they do not pay.
        waits: how many of them are left.
    """

    accepted: float
    steps: int = 0
    pause: int = 1
    waits: int = 0


@dataclass(eq=False)
class Row:
    """A sequence whose next tokens are drafted.

    Attributes:
        tokens: of its prompt, and of its answer so far.
        prompt: how many of them are the prompt's.
        likely: tokens that the answer probably has, in their order, such as the text that it changes.
        most: how many tokens may be drafted now.
        drafter: the number of the one whose drafts these are.
        acceptance: by the number of a drafter.
        failed: the numbers of drafters that have raised for it, and are not asked for it any more.
    """

    tokens: list[int]
    prompt: int
    likely: list[int] = field(default_factory=list)
    most: int = 0
    drafter: int = 0
    acceptance: dict[int, Acceptance] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


class Drafter(ABC):
    """Drafts tokens. The model's answer is the same whatever they are.

    An exception of a drafter ends its drafts for that row alone.

    Attributes:
        is_cheap: it is asked in each step, before the last token is known, too: to draft costs it next to
            nothing. Any other is asked where drafts pay.
        states: numbers of the model's hidden states that `computed` gets; -1 is those behind its last layer.
        modules: that it computes with beside the model.
        layers: how many layers of the model's checkpoint draft.
    """

    is_cheap = False
    states: tuple[int, ...] = ()
    modules: Sequence[nn.Module] = ()
    layers = 0

    @abstractmethod
    def draft(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """Draft tokens of each row, at most `row.most`; none where nothing is known."""

    def accepted(self, rows: Sequence[Row], counts: Sequence[int]) -> None:  # noqa: B027
        """Takes how many of the last drafts of each row were accepted; these, and the token behind them, are
        among the row's now.
        """

    def computed(self, row: Row, first: int, states: Tensor) -> None:  # noqa: B027
        """Takes the model's `states`, side by side [1, T, H], of a row's tokens from place `first` on, each
        once and in their order.
        """

    def left(self, row: Row) -> None:  # noqa: B027
        """Ends a row, whose answer has ended, unless all end by a fault."""

    def held(self, row: Row) -> int:
        """Bytes that it holds for a row."""
        return 0

    def shrink(self, memory: int) -> int:
        """Gives up prompts that it keeps, to at most so many bytes. Returns: the bytes of the rest."""
        return 0


class Read(Protocol):
    """A row, as far as a drafter has read it."""

    def memory(self) -> int:
        """Bytes that it holds."""


R = TypeVar("R", bound=Read)


class RowDrafter(Drafter, Generic[R]):
    """A drafter of one row after the other, from a cache of its own for each."""

    def __init__(self, memory: int = 0) -> None:
        self._read: WeakKeyDictionary[Row, R] = WeakKeyDictionary()
        self.prompts = PrefixCache(memory)

    @torch.no_grad()
    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        return [self._of(row) if row.most else [] for row in rows]

    @abstractmethod
    def _of(self, row: Row) -> list[int]:
        """Draft tokens of a row, at most `row.most`."""

    def held(self, row: Row) -> int:
        read = self._read.get(row)
        return 0 if read is None else read.memory()

    def shrink(self, memory: int) -> int:
        self.prompts.shrink(memory)
        return self.prompts.octets
