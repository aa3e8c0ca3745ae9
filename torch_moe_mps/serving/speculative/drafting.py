"""The drafts of a batch: asked of drafters that pay, and none where tokens cannot be taken back."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ..._text import first_line
from ..engine.job import as_errors
from ..engine.ranges import placeholders_of, vocabulary_of
from .drafter import Drafter, Row
from .width import Width

logger = logging.getLogger(__name__)


class Drafting:
    """Asks drafters for the drafts of a batch, and counts the accepted ones.

    Args:
        model: that verifies the drafts.
        drafters: each row has the drafts of the first one that has some, and pays.
        width: chooses how many there are.

    Attributes:
        accepted, rejected: draft tokens so far, that were verified; those behind the first wrong one count
            as rejected.
        seconds: that the last drafts took.
    """

    def __init__(self, model: Any, drafters: Sequence[Drafter], width: Width):
        self.width, self.accepted, self.rejected, self.seconds = width, 0, 0, 0.0
        self._drafters = dict(enumerate(drafters))
        self._faults: dict[int, str] = {}  # the last one of each drafter: it is logged once
        self._vocabulary = vocabulary_of(model)
        self._no_text = placeholders_of(model)

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the model's states that drafters want, side by side."""
        return tuple(sorted({number for each in self._drafters.values() for number in each.states}))

    def __str__(self) -> str:
        drafted = self.accepted + self.rejected
        share = f" ({100 * self.accepted / drafted:.0f} %)" if drafted else ""
        return f"{self.accepted} of {drafted} draft tokens accepted{share}"

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that drafters compute with beside the model."""
        return [module for each in self._drafters.values() for module in each.modules]

    @property
    def layers(self) -> int:
        """How many layers of the model's checkpoint draft."""
        return sum(each.layers for each in self._drafters.values())

    def held(self, row: Row) -> int:
        """Bytes that drafters hold for a row."""
        return sum(each.held(row) for each in self._drafters.values())

    def shrink(self, memory: int) -> int:
        """Gives up prompts that drafters keep, to at most half of so many bytes. Returns: the rest."""
        each = max(0, memory) // (2 * max(1, len(self._drafters)))
        return memory - sum(drafter.shrink(each) for drafter in self._drafters.values())

    def give_up(self, reason: object) -> None:
        """Drafts nothing any more; a line of the log says why."""
        self._drafters.clear()
        logger.warning("torch_moe_mps: no tokens are drafted any more: %s", reason)

    def may_pay(self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int]) -> bool:
        """Whether the next step may have drafts, where the last tokens are not known yet.

        Drafters that are cheap are asked; of others, it is enough that they would pay.
        """
        cheap = [number for number, each in self._drafters.items() if each.is_cheap]
        others = self._drafters.keys() - {*cheap}
        if any(room) and any(self._asked(number, rows) for number in others):
            return True
        return self._of(rows, ahead, room, cheap) is not None

    def draft(self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int]) -> list[list[int]] | None:
        """Drafts for each row, and how many tokens a step has; None where none has any.

        Args:
            ahead: how many tokens of each row are known behind the first of a step.
            room: how many drafts each row may have.
        """
        found = self._of(rows, ahead, room, [*self._drafters])
        if found is None:
            for row in rows:
                self._rest(row, self._drafters)
        return found

    def _of(
        self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int], asked: Sequence[int]
    ) -> list[list[int]] | None:
        """Drafts of these drafters: each is asked for the rows that have none yet."""
        started, found = time.perf_counter(), {row: list[int]() for row in rows}
        for row, known, most in zip(rows, ahead, room, strict=True):
            row.most = max(0, min(most, self.width.tokens - known))
        for number in asked:
            left = [row for row in self._asked(number, rows) if not found[row] and row.most]
            if left and not self._draft(number, left, found) and len(left) > 1:
                for row in left:  # one of them fails
                    self._draft(number, [row], found)
        self.seconds = time.perf_counter() - started
        width = self.width.best([known + len(found[row]) for row, known in zip(rows, ahead, strict=True)])
        drafts = [found[row][: max(0, width - known)] for row, known in zip(rows, ahead, strict=True)]
        return drafts if any(drafts) else None

    def _asked(self, number: int, rows: Sequence[Row]) -> list[Row]:
        """The rows that a drafter is asked for."""
        return [row for row in self.width.pays(rows, number) if number not in row.failed]

    def _draft(self, number: int, rows: Sequence[Row], found: dict[Row, list[int]]) -> bool:
        """Whether a drafter drafts for these rows. A row alone that it fails for is not asked for again."""
        with self._fails(number, rows if len(rows) == 1 else ()):
            for row, own in zip(rows, self._checked(self._drafters[number].draft(rows), rows), strict=True):
                found[row], row.drafter = own, number
            return True
        return False

    def _checked(self, drafts: Any, rows: Sequence[Row]) -> list[list[int]]:
        """The drafts of a drafter, at most as many of each row as were asked for, up to one of an image.

        Raises: ValueError for what are no tokens of the model.
        """
        made = [[int(token) for token in own[: row.most]] for own, row in zip(drafts, rows, strict=True)]
        wrong = next((token for own in made for token in own if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ValueError(f"drafts must be tokens below {self._vocabulary}, got {wrong}")
        return [[*takewhile(lambda token: token not in self._no_text, own)] for own in made]

    def _rest(self, row: Row, drafters: Iterable[int]) -> None:
        for drafter in drafters:
            self.width.rested(row, drafter)

    def verified(self, rows: Sequence[Row], held: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Notes how many draft tokens of each row were accepted."""
        for row, count, own in zip(rows, held, drafts, strict=True):
            self.accepted += count
            self.rejected += len(own) - count
            if own:
                self.width.verified(row, count, len(own))
                self._rest(row, self._drafters.keys() - {row.drafter})
        counts = dict(zip(rows, held, strict=True))
        for number, drafter in self._drafters.items():
            asked = [row for row in rows if number not in row.failed]
            with self._fails(number, asked):
                drafter.accepted(asked, [counts[row] for row in asked])

    def computed(
        self, rows: Sequence[Row], firsts: Sequence[int], states: Tensor, counts: Sequence[int]
    ) -> None:
        """Hands on the model's states [B, T, H] of `counts` tokens of rows, from their places `firsts` on."""
        wanted = self.states
        each = states.chunk(len(wanted), -1)
        for number, drafter in self._drafters.items():
            if not (own := drafter.states):
                continue
            parts = states if own == wanted else torch.cat([each[wanted.index(state)] for state in own], -1)
            for place, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=True)):
                if count > 0 and number not in row.failed:
                    with self._fails(number, [row]):
                        drafter.computed(row, first, parts[place : place + 1, :count])

    def left(self, row: Row) -> None:
        """Tells the drafters that the answer of a row has ended."""
        for number, drafter in self._drafters.items():
            if number not in row.failed:
                with self._fails(number, [row]):
                    drafter.left(row)

    @contextmanager
    def _fails(self, number: int, rows: Sequence[Row]) -> Iterator[None]:
        """Block of a drafter: its exceptions end its drafts for these sequences, and nothing else."""
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
