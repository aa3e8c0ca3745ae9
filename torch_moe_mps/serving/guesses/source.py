"""The protocol of what guesses tokens, and the conversations that it guesses for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(eq=False)
class Row:
    """A conversation whose next tokens are guessed.

    Attributes:
        tokens: of its prompt, and of its answer so far.
        prompt: how many of them are the prompt's.
        likely: tokens that the answer probably has, in their order, such as the text that it changes.
        most: how many tokens may be guessed now.
        hits, tries: running counts of guesses that were verified: the model's own tokens among them, and all.
    """

    tokens: list[int]
    prompt: int
    likely: list[int] = field(default_factory=list)
    most: int = 0
    hits: float = 0.0
    tries: float = 0.0


class Source(Protocol):
    """Guesses tokens. The model's answer is the same whatever they are.

    One with an attribute `is_cheap` that is true is asked in each step, before the last token is known, too:
    to guess costs it next to nothing. Any other is asked where guesses pay.
    """

    def guess(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """Tokens that may follow those of each row, at most `row.most`; none where nothing is known."""

    def accepted(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Takes how many of the last guesses of each row held; their tokens, and the one behind them, are
        among the row's now.
        """
