"""How many tokens are guessed: as many as give the most tokens a second, by the times of steps so far."""

import math
from collections.abc import Sequence

from ...transformers.attention.attention import MOST_TOKENS
from .source import Row

MOST = MOST_TOKENS - 1  # a step has a token that is known in front of the guesses
_LEAST_GAIN = 1.02  # in tokens a second, for which tokens are guessed
_SAMPLES = 3  # steps of a kind whose time is not its own: what they run is captured, and compiled
_NEW = 0.1  # the part that a step has in the mean of its kind
_SLOPE = 0.1  # a part of a step for each token more, until one of its kind was measured
# Time that guesses may lose, in tokens: so much at first and at most, what they gained, and a share of the
# tokens that are generated.
_LOSS, _GAIN, _SHARE = 1.5, 4.0, 0.01
# Running counts of guesses: what remains of them in a step of guesses and in one without, and how they begin.
_REMAINS, _REST, _PRIOR, _WEIGHT = 0.9, 0.99, 0.5, 2.0


class Width:
    """Chooses how many tokens are guessed for each row, from 0.

    Args:
        fixed: as many always; None leaves it to the times.
    """

    def __init__(self, fixed: int | None = None):
        self.fixed = fixed
        self._seconds: dict[tuple[int, int], float] = {}  # {(rows, tokens of each): the mean of a step}
        self._counts: dict[tuple[int, int], int] = {}
        self._budget = _LOSS
        self._hits, self._tries = 0.0, 0.0  # over all rows

    def begin(self) -> None:
        """A conversation begins: it does not pay with what others gained."""
        self._budget = min(self._budget, _LOSS)

    def best(self, rows: Sequence[Row], found: Sequence[int]) -> int:
        """How many tokens of each row a step has behind the first; 0 where guesses do not pay.

        A step moves all rows on by the fewest tokens that hold for a row.

        Args:
            found: how many tokens each row can have.
        """
        most = min(MOST, *found)
        if self.fixed is not None:
            return min(most, self.fixed)
        many, plain = len(rows), self._seconds.get((len(rows), 1))
        if plain is None or self._counts[many, 1] <= _SAMPLES:
            return 0
        rate = math.prod(map(self._rate, rows))
        most = min(most, max(tokens for of, tokens in self._seconds if of == many))  # one more than before
        best, highest = 0, _LEAST_GAIN / plain
        for width in range(1, most + 1):
            seconds = self._predicted(many, 1 + width)
            steps = sum(rate**n for n in range(width + 1))
            if steps / seconds > highest and seconds / plain - 1 <= self._budget:
                best, highest = width, steps / seconds
        return best

    def took(self, many: int, tokens: int, seconds: float, made: int) -> None:
        """Notes a step.

        Args:
            many: rows.
            tokens: of each row, those that were known included.
            made: new tokens of all rows together.
        """
        kind = many, tokens
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        before = self._seconds.get(kind)
        if (plain := self._seconds.get((many, 1))) is not None:
            usual = self._predicted(many, tokens) if count <= _SAMPLES else self._seconds[kind]
            steps, room = made / many, max(0.0, _LOSS - self._budget)
            gained = 0.0 if tokens == 1 else steps - min(seconds, 2 * usual) / plain
            self._budget = min(_GAIN, self._budget + min(_SHARE * steps, room) + gained)
        if count <= _SAMPLES:
            self._seconds[kind] = seconds if before is None else min(before, seconds)
        else:
            self._seconds[kind] += _NEW * (min(seconds, 2 * self._seconds[kind]) - self._seconds[kind])

    def verified(self, row: Row, held: int, guessed: int) -> None:
        """Notes how many guesses of a row held, up to the first that did not."""
        tried = held + (held < guessed)
        row.hits, row.tries = _REMAINS * row.hits + held, _REMAINS * row.tries + tried
        self._hits, self._tries = _REST * self._hits + held, _REST * self._tries + tried

    def rested(self, row: Row) -> None:
        """Notes that guesses of a row were not verified: it forgets, so that they are tried again."""
        row.hits, row.tries = _REST * row.hits, _REST * row.tries
        self._hits, self._tries = _REST * self._hits, _REST * self._tries

    def _rate(self, row: Row) -> float:
        """The part of a row's guesses that hold, as far as is known."""
        of_all = (self._hits + _WEIGHT * _PRIOR) / (self._tries + _WEIGHT)
        return (row.hits + _WEIGHT * of_all) / (row.tries + _WEIGHT)

    def _predicted(self, many: int, tokens: int) -> float:
        """Seconds of a step: of its kind, or along the line through the nearest ones."""
        if (known := self._seconds.get((many, tokens))) is not None:
            return known
        measured = sorted(t for rows, t in self._seconds if rows == many)
        below = max(t for t in measured if t < tokens)
        at = self._seconds[many, below]
        above = [t for t in measured if t > tokens]
        if above:
            slope = (self._seconds[many, above[0]] - at) / (above[0] - below)
        elif below > 1:
            slope = (at - self._seconds[many, 1]) / (below - 1)
        else:
            slope = _SLOPE * at
        return at + max(slope, 0.0) * (tokens - below)
