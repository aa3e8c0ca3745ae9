"""Draft tokens of a batch, from the drafters that currently pay."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ..._text import first_line
from .drafter import DraftedSequence, Drafter
from .job import as_errors
from .ranges import placeholders_of, vocabulary_of
from .width import Width

logger = logging.getLogger(__name__)


class Drafting:
    """Runs the drafters of a batch, and counts accepted tokens.

    Args:
        model: the target model.
        drafters: in order of priority; each row uses the first that pays and has draft tokens.
        width: chooses the number of draft tokens.

    Attributes:
        accepted, rejected: verified draft tokens so far; all after the first wrong one count as rejected.
        seconds: duration of the last drafting.
    """

    def __init__(self, model: Any, drafters: Sequence[Drafter], width: Width):
        self.width, self.accepted, self.rejected, self.seconds = width, 0, 0, 0.0
        self._drafters = dict(enumerate(drafters))
        self._faults: dict[int, str] = {}  # the last one of each drafter: it is logged once
        self._vocabulary = vocabulary_of(model)
        self._no_text = placeholders_of(model)

    @property
    def states(self) -> tuple[int, ...]:
        """Sorted indices of the hidden states that drafters need."""
        return tuple(sorted({number for each in self._drafters.values() for number in each.states}))

    def __str__(self) -> str:
        drafted = self.accepted + self.rejected
        share = f" ({100 * self.accepted / drafted:.0f} %)" if drafted else ""
        return f"{self.accepted} of {drafted} draft tokens accepted{share}"

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that drafters run beside the target model."""
        return [module for each in self._drafters.values() for module in each.modules]

    @property
    def layers(self) -> int:
        """Number of MTP layers in use."""
        return sum(each.layers for each in self._drafters.values())

    def held(self, row: DraftedSequence) -> int:
        """Bytes held by drafters for a row."""
        return sum(each.held(row) for each in self._drafters.values())

    def shrink(self, memory: int) -> int:
        """Shrinks drafters' prefix caches to at most half of `memory`. Returns: the remaining bytes."""
        each = max(0, memory) // (2 * max(1, len(self._drafters)))
        return memory - sum(drafter.shrink(each) for drafter in self._drafters.values())

    def give_up(self, reason: object) -> None:
        """Disables all drafters and logs the reason."""
        self._drafters.clear()
        logger.warning("torch_moe_mps: no tokens are drafted any more: %s", reason)

    def may_pay(self, rows: Sequence[DraftedSequence], ahead: Sequence[int], room: Sequence[int]) -> bool:
        """True if drafting may pay in the next step, before the last tokens are known.

        Cheap drafters are called; for others it is enough that they currently pay.
        """
        cheap = [number for number, each in self._drafters.items() if each.is_cheap]
        others = self._drafters.keys() - {*cheap}
        if any(room) and any(self._asked(number, rows) for number in others):
            return True
        return self._of(rows, ahead, room, cheap) is not None

    def draft(
        self, rows: Sequence[DraftedSequence], ahead: Sequence[int], room: Sequence[int]
    ) -> list[list[int]] | None:
        """Draft tokens of each row, or None if there are none.

        Args:
            ahead: number of known tokens of each row after the first one of the step.
            room: maximum number of draft tokens of each row.
        """
        found = self._of(rows, ahead, room, [*self._drafters])
        if found is None:
            for row in rows:
                self._rest(row, self._drafters)
        return found

    def _of(
        self, rows: Sequence[DraftedSequence], ahead: Sequence[int], room: Sequence[int], asked: Sequence[int]
    ) -> list[list[int]] | None:
        """Draft tokens from the given drafters, each called for the rows that have none yet."""
        started, found = time.perf_counter(), {row: list[int]() for row in rows}
        for row, known, limit in zip(rows, ahead, room, strict=True):
            row.max_drafts = max(0, min(limit, self.width.tokens - known))
        for number in asked:
            left = [row for row in self._asked(number, rows) if not found[row] and row.max_drafts]
            if left and not self._draft(number, left, found) and len(left) > 1:
                for row in left:  # one of them fails
                    self._draft(number, [row], found)
        self.seconds = time.perf_counter() - started
        width = self.width.best([known + len(found[row]) for row, known in zip(rows, ahead, strict=True)])
        drafts = [found[row][: max(0, width - known)] for row, known in zip(rows, ahead, strict=True)]
        return drafts if any(drafts) else None

    def _asked(self, number: int, rows: Sequence[DraftedSequence]) -> list[DraftedSequence]:
        """Rows for which a drafter pays and is not disabled."""
        return [row for row in self.width.pays(rows, number) if number not in row.failed]

    def _draft(
        self, number: int, rows: Sequence[DraftedSequence], found: dict[DraftedSequence, list[int]]
    ) -> bool:
        """Calls a drafter. Returns: False if it raised; a single row is then disabled for it."""
        with self._fails(number, rows if len(rows) == 1 else ()):
            for row, row_draft in zip(
                rows, self._checked(self._drafters[number].draft(rows), rows), strict=True
            ):
                found[row], row.drafter = row_draft, number
            return True
        return False

    def _checked(self, drafts: Any, rows: Sequence[DraftedSequence]) -> list[list[int]]:
        """A drafter's tokens, limited to each row's maximum and cut before image placeholders.

        Raises: ValueError for values outside the vocabulary.
        """
        asked = zip(drafts, rows, strict=True)
        limited = [[int(token) for token in row_draft[: row.max_drafts]] for row_draft, row in asked]
        wrong = next(
            (token for row_draft in limited for token in row_draft if not 0 <= token < self._vocabulary), None
        )
        if wrong is not None:
            raise ValueError(f"drafts must be tokens below {self._vocabulary}, got {wrong}")
        return [[*takewhile(lambda token: token not in self._no_text, row_draft)] for row_draft in limited]

    def _rest(self, row: DraftedSequence, drafters: Iterable[int]) -> None:
        for drafter in drafters:
            self.width.rested(row, drafter)

    def verified(
        self, rows: Sequence[DraftedSequence], accepted_counts: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> None:
        """Records the number of accepted draft tokens of each row, and informs the drafters."""
        for row, count, row_draft in zip(rows, accepted_counts, drafts, strict=True):
            self.accepted += count
            self.rejected += len(row_draft) - count
            if row_draft:
                self.width.verified(row, count, len(row_draft))
                self._rest(row, self._drafters.keys() - {row.drafter})
        counts = dict(zip(rows, accepted_counts, strict=True))
        for number, drafter in self._drafters.items():
            asked = [row for row in rows if number not in row.failed]
            with self._fails(number, asked):
                drafter.accepted(asked, [counts[row] for row in asked])

    def computed(
        self, rows: Sequence[DraftedSequence], firsts: Sequence[int], states: Tensor, counts: Sequence[int]
    ) -> None:
        """Passes hidden states [B, T, H] of `counts` tokens per row, from `firsts` on, to the drafters."""
        wanted = self.states
        each = states.chunk(len(wanted), -1)
        for number, drafter in self._drafters.items():
            if not (drafter_states := drafter.states):
                continue
            parts = (
                states
                if drafter_states == wanted
                else torch.cat([each[wanted.index(state)] for state in drafter_states], -1)
            )
            for place, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=True)):
                if count > 0 and number not in row.failed:
                    with self._fails(number, [row]):
                        drafter.computed(row, first, parts[place : place + 1, :count])

    def left(self, row: DraftedSequence) -> None:
        """Releases the drafters' state of a row whose answer has ended."""
        for number, drafter in self._drafters.items():
            if number not in row.failed:
                with self._fails(number, [row]):
                    drafter.left(row)

    @contextmanager
    def _fails(self, number: int, rows: Sequence[DraftedSequence]) -> Iterator[None]:
        """Context of a drafter call; an exception disables the drafter for these rows only."""
        try:
            with as_errors():
                yield
        except torch.AcceleratorError:  # whatever the GPU computes is wrong then
            raise
        except Exception as error:
            for row in rows:
                row.failed.add(number)
            reason = f"{type(error).__name__}: {first_line(error)}"
            if rows and self._faults.get(number) != reason:
                self._faults[number] = reason
                kind = type(self._drafters[number]).__name__
                logger.warning("torch_moe_mps: %s drafts no tokens for a sequence: %s", kind, reason)
