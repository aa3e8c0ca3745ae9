"""The guesses of a batch: asked of a source, as many as pay, and none where tokens cannot be taken back."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..._text import first_line
from ..job import as_errors
from ..ranges import placeholders_of, vocabulary_of
from .source import Row, Source, told
from .width import Width

logger = logging.getLogger(__name__)


class Guessing:
    """Asks a source for the guesses of a batch, and counts those that hold.

    Args:
        model: that verifies the guesses.
        source: of the guesses.
        width: chooses how many there are.

    Attributes:
        accepted, rejected: guessed tokens so far, that were verified; those behind the first wrong one count
            as rejected.
        seconds: that the last guesses took.
    """

    def __init__(self, model: Any, source: Source, width: Width):
        self.width, self.accepted, self.rejected, self.seconds = width, 0, 0, 0.0
        self._source: Source | None = source
        self._vocabulary = vocabulary_of(model)
        self._no_text = placeholders_of(model)

    @property
    def is_cheap(self) -> bool:
        return bool(getattr(self._source, "is_cheap", False))

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the model's states that the source wants, side by side."""
        wanted: tuple[int, ...] = getattr(self._source, "states", ())
        return wanted

    def __str__(self) -> str:
        guessed = self.accepted + self.rejected
        share = f" ({100 * self.accepted / guessed:.0f} %)" if guessed else ""
        return f"{self.accepted} of {guessed} guessed tokens accepted{share}"

    def give_up(self, reason: object) -> None:
        """Guesses nothing any more; a line of the log says why."""
        self._source = None
        logger.warning("torch_moe_mps: no tokens are guessed any more: %s", reason)

    def pays(self, rows: Sequence[Row], room: Sequence[int]) -> bool:
        """Whether guesses may pay of which nothing is known yet but how many each row may have."""
        return self._source is not None and self.width.best(rows, room) > 0

    def guess(self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int]) -> list[list[int]] | None:
        """Guesses for each row, and how many tokens a step has; None where to guess none is faster.

        Args:
            ahead: how many tokens of each row are known behind the first of a step.
            room: how many guesses each row may have.
        """
        source, width = self._source, 0
        if source is not None:
            width = self.width.best(rows, [*map(sum, zip(ahead, room, strict=True))])
        if source is None or width == 0:
            self._rest(rows)
            return None
        for row, known, most in zip(rows, ahead, room, strict=True):
            row.most = max(0, min(most, width - known))
        started, found = time.perf_counter(), None
        with self._source_fails():
            found = self._checked(source.guess(rows), rows)
        if found is None:
            return None
        self.seconds = time.perf_counter() - started
        width = self.width.best(rows, [known + len(own) for known, own in zip(ahead, found, strict=True)])
        if width == 0:
            self._rest(rows)
            return None
        return [own[: max(0, width - known)] for known, own in zip(ahead, found, strict=True)]

    def _checked(self, guesses: Any, rows: Sequence[Row]) -> list[list[int]]:
        """The guesses of a source, at most as many of each row as were asked for, up to one of an image.

        Raises: ValueError for what are no tokens of the model.
        """
        made = [[int(token) for token in own[: row.most]] for own, row in zip(guesses, rows, strict=True)]
        wrong = next((token for own in made for token in own if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ValueError(f"guesses must be tokens below {self._vocabulary}, got {wrong}")
        return [[*takewhile(lambda token: token not in self._no_text, own)] for own in made]

    def _rest(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.width.rested(row)

    def verified(self, rows: Sequence[Row], held: Sequence[int], guesses: Sequence[Sequence[int]]) -> None:
        """Notes how many guesses of each row held."""
        for row, count, own in zip(rows, held, guesses, strict=True):
            self.accepted += count
            self.rejected += len(own) - count
            if own:
                self.width.verified(row, count, len(own))
        if self._source is not None:
            with self._source_fails():
                self._source.accepted(rows, held)

    def computed(self, rows: Sequence[Row], firsts: Sequence[int], states: Tensor) -> None:
        """Hands on the model's states [B, T, H] of tokens of each row, from its place of `firsts` on."""
        with self._source_fails():
            for number, (row, first) in enumerate(zip(rows, firsts, strict=True)):
                told(self._source, "computed")(row, first, states[number : number + 1])

    def left(self, row: Row) -> None:
        """Tells the source that the answer of a row has ended."""
        with self._source_fails():
            told(self._source, "left")(row)

    @contextmanager
    def _source_fails(self) -> Iterator[None]:
        """Block of a source: what it raises ends guesses, and no answer."""
        try:
            with as_errors():
                yield
        except torch.AcceleratorError:  # whatever the GPU computes is wrong then
            raise
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {first_line(error)}")
