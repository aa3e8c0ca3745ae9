"""The drafts of a batch: asked of sources, as many as pay, and none where tokens cannot be taken back."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ..._text import first_line
from ..engine.job import as_errors
from ..engine.ranges import placeholders_of, vocabulary_of
from .drafter import Row, Source, told
from .width import Width

logger = logging.getLogger(__name__)


class Drafting:
    """Asks sources for the drafts of a batch, and counts the accepted ones.

    Args:
        model: that verifies the drafts.
        sources: drafters; each row has the drafts of the first one that has some, and pays.
        width: chooses how many there are.

    Attributes:
        accepted, rejected: draft tokens so far, that were verified; those behind the first wrong one count
            as rejected.
        seconds: that the last drafts took.
    """

    def __init__(self, model: Any, sources: Sequence[Source], width: Width):
        self.width, self.accepted, self.rejected, self.seconds = width, 0, 0, 0.0
        self._sources = dict(enumerate(sources))
        self._faults: dict[int, str] = {}  # the last one of each source: it is logged once
        self._vocabulary = vocabulary_of(model)
        self._no_text = placeholders_of(model)

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the model's states that sources want, side by side."""
        return tuple(sorted({number for each in self._sources.values() for number in _states(each)}))

    def __str__(self) -> str:
        drafted = self.accepted + self.rejected
        share = f" ({100 * self.accepted / drafted:.0f} %)" if drafted else ""
        return f"{self.accepted} of {drafted} draft tokens accepted{share}"

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that sources compute with beside the model."""
        return [module for each in self._sources.values() for module in getattr(each, "modules", ())]

    @property
    def layers(self) -> int:
        """How many layers of the model's checkpoint draft."""
        return sum(getattr(each, "layers", 0) for each in self._sources.values())

    def held(self, row: Row) -> int:
        """Bytes that sources hold for a row."""
        held = (getattr(each, "held", None) for each in self._sources.values())
        return sum(of(row) for of in held if of is not None)

    def shrink(self, memory: int) -> int:
        """Gives up prompts that sources keep, to at most half of so many bytes. Returns: the rest."""
        kept = [own for each in self._sources.values() if (own := getattr(each, "prompts", None)) is not None]
        for prompts in kept:
            prompts.shrink(max(0, memory) // (2 * len(kept)))
        return memory - sum(prompts.octets for prompts in kept)

    def give_up(self, reason: object) -> None:
        """Drafts nothing any more; a line of the log says why."""
        self._sources.clear()
        logger.warning("torch_moe_mps: no tokens are drafted any more: %s", reason)

    def may_pay(self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int]) -> bool:
        """Whether the next step may have drafts, where the last tokens are not known yet.

        Sources that are cheap are asked; of others, it is enough that as many as there is room for would pay.
        """
        none, cheap = {row: list[int]() for row in rows}, []
        for number, source in self._sources.items():
            if _is_cheap(source):
                cheap.append(number)
            elif _asks(number, rows) and self._best(rows, number, none, ahead, room) > 0:
                return True
        return self._of(rows, ahead, room, cheap) is not None

    def draft(self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int]) -> list[list[int]] | None:
        """Drafts for each row, and how many tokens a step has; None where to draft none is faster.

        Args:
            ahead: how many tokens of each row are known behind the first of a step.
            room: how many drafts each row may have.
        """
        return self._of(rows, ahead, room, [*self._sources])

    def _of(
        self, rows: Sequence[Row], ahead: Sequence[int], room: Sequence[int], asked: Sequence[int]
    ) -> list[list[int]] | None:
        """Drafts of these sources: each is asked for the rows that have none yet."""
        started, found = time.perf_counter(), {row: list[int]() for row in rows}
        for number in asked:
            left = _asks(number, [row for row in rows if not found[row]])
            width = self._best(rows, number, found, ahead, room) if left else 0
            if width == 0:
                continue
            for row, known, most in zip(rows, ahead, room, strict=True):
                row.most = max(0, min(most, width - known))
            if not self._draft(number, left, found) and len(left) > 1:
                for row in left:  # one of them fails
                    self._draft(number, [row], found)
        self.seconds = time.perf_counter() - started
        every = [known + len(found[row]) for row, known in zip(rows, ahead, strict=True)]
        width = self.width.best(rows, every, ahead)
        if width == 0:
            for row in rows:
                self._rest(row, self._sources)
            return None
        return [found[row][: max(0, width - known)] for row, known in zip(rows, ahead, strict=True)]

    def _draft(self, number: int, rows: Sequence[Row], found: dict[Row, list[int]]) -> bool:
        """Whether a source drafts for these rows. A row alone that it fails for is not asked for again."""
        with self._fails(number, rows if len(rows) == 1 else ()):
            found |= zip(rows, self._checked(self._sources[number].draft(rows), rows), strict=True)
            return True
        return False

    def _best(
        self,
        rows: Sequence[Row],
        number: int,
        found: Mapping[Row, list[int]],
        ahead: Sequence[int],
        room: Sequence[int],
    ) -> int:
        """The width that pays where a source drafts all that there is room for in rows without drafts."""
        for row in rows:
            row.source = row.source if found[row] or number in row.failed else number
        lengths = (
            len(found[row]) or (0 if number in row.failed else most)
            for row, most in zip(rows, room, strict=True)
        )
        return self.width.best(rows, [*map(sum, zip(ahead, lengths, strict=True))], ahead)

    def _checked(self, drafts: Any, rows: Sequence[Row]) -> list[list[int]]:
        """The drafts of a source, at most as many of each row as were asked for, up to one of an image.

        Raises: ValueError for what are no tokens of the model.
        """
        made = [[int(token) for token in own[: row.most]] for own, row in zip(drafts, rows, strict=True)]
        wrong = next((token for own in made for token in own if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ValueError(f"drafts must be tokens below {self._vocabulary}, got {wrong}")
        return [[*takewhile(lambda token: token not in self._no_text, own)] for own in made]

    def _rest(self, row: Row, sources: Iterable[int]) -> None:
        for source in sources:
            self.width.rested(row, source)

    def verified(self, rows: Sequence[Row], held: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Notes how many draft tokens of each row were accepted."""
        for row, count, own in zip(rows, held, drafts, strict=True):
            self.accepted += count
            self.rejected += len(own) - count
            if own:
                self.width.verified(row, count, len(own))
                self._rest(row, self._sources.keys() - {row.source})
        counts = dict(zip(rows, held, strict=True))
        for number, source in self._sources.items():
            asked = _asks(number, rows)
            with self._fails(number, asked):
                source.accepted(asked, [counts[row] for row in asked])

    def computed(
        self, rows: Sequence[Row], firsts: Sequence[int], states: Tensor, counts: Sequence[int]
    ) -> None:
        """Hands on the model's states [B, T, H] of `counts` tokens of rows, from their places `firsts` on."""
        wanted = self.states
        each = states.chunk(len(wanted), -1)
        for number, source in self._sources.items():
            if not (own := _states(source)):
                continue
            parts = states if own == wanted else torch.cat([each[wanted.index(state)] for state in own], -1)
            for place, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=True)):
                if count > 0 and number not in row.failed:
                    with self._fails(number, [row]):
                        told(source, "computed")(row, first, parts[place : place + 1, :count])

    def left(self, row: Row) -> None:
        """Tells the sources that the answer of a row has ended."""
        for number, source in self._sources.items():
            if number not in row.failed:
                with self._fails(number, [row]):
                    told(source, "left")(row)

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
                kind = type(self._sources[number]).__name__
                logger.warning("torch_moe_mps: %s drafts no tokens for a sequence: %s", kind, reason)


def _asks(number: int, rows: Sequence[Row]) -> list[Row]:
    """The rows that a source has not failed for."""
    return [row for row in rows if number not in row.failed]


def _is_cheap(source: Source) -> bool:
    return bool(getattr(source, "is_cheap", False))


def _states(source: Source) -> tuple[int, ...]:
    """Numbers of the model's states that a source wants."""
    wanted: tuple[int, ...] = getattr(source, "states", ())
    return wanted
