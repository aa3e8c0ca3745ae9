"""The protocol of drafters, and the sequences that they draft for."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch


@dataclass
class Held:
    """Running counts of verified draft tokens.

    Attributes:
        hits, tries: accepted ones, and all.
    """

    hits: float = 0.0
    tries: float = 0.0


@dataclass(eq=False)
class Row:
    """A sequence whose next tokens are drafted.

    Attributes:
        tokens: of its prompt, and of its answer so far.
        prompt: how many of them are the prompt's.
        likely: tokens that the answer probably has, in their order, such as the text that it changes.
        most: how many tokens may be drafted now.
        source: the number of the source that is asked, or whose drafts these are.
        held: counts of accepted drafts of each source, by its number.
        budget: time that drafts may lose before they have to gain, in tokens.
        failed: the numbers of sources that have raised for it, and are not asked for it any more.
    """

    tokens: list[int]
    prompt: int
    likely: list[int] = field(default_factory=list)
    most: int = 0
    source: int = 0
    held: defaultdict[int, Held] = field(default_factory=lambda: defaultdict(Held))
    budget: float = 0.0
    failed: set[int] = field(default_factory=set)


class Source(Protocol):
    """Drafts tokens. The model's answer is the same whatever they are.

    One with an attribute `is_cheap` that is true is asked in each step, before the last token is known, too:
    to draft costs it next to nothing. Any other is asked where drafts pay.

    One with an attribute `states`, numbers of the model's hidden states (-1: those behind its last layer),
    has a method `computed(row, first, states)`, which gets them side by side, [1, T, H], of a row's tokens
    from place `first` on, each once and in their order. One with `left(row)` is told that the row's answer
    has ended, unless all end by a fault. What a source raises ends its drafts for that row alone.

    What a source takes of the memory, it says by `modules`, which it computes with beside the model, by
    `prompts`, which it keeps, by `held(row)`: bytes of a row, and by `layers`: how many of its layers are of
    the model's kind.
    """

    def draft(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """Draft tokens of each row, at most `row.most`; none where nothing is known."""

    def accepted(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Takes how many of the last drafts of each row were accepted; these, and the token behind them, are
        among the row's now.
        """


class Read(Protocol):
    """A row, as far as a source has read it."""

    def memory(self) -> int:
        """Bytes that it holds."""


R = TypeVar("R", bound=Read)


class RowSource(ABC, Generic[R]):
    """A `Source` that computes the drafts of one row after the other, from a cache of its own for each."""

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[Row, R] = WeakKeyDictionary()

    @torch.no_grad()
    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        return [self._of(row) if row.most else [] for row in rows]

    @abstractmethod
    def _of(self, row: Row) -> list[int]:
        """Draft tokens of a row, at most `row.most`."""

    def accepted(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Needs no count: rejected tokens are taken back from the cache, with the draft or the next one."""

    def held(self, row: Row) -> int:
        read = self._read.get(row)
        return 0 if read is None else read.memory()


def told(source: Source | None, name: str) -> Any:
    """A method of a source; one that does nothing where it has none."""
    return getattr(source, name, lambda *_: None)
