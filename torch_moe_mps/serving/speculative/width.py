"""How many tokens are drafted: as many as give the most tokens a second, by the times of steps so far."""

from collections import defaultdict
from collections.abc import Sequence

from ...transformers.attention.attention import MOST_TOKENS
from .drafter import Held, Row

MOST = MOST_TOKENS - 1  # a step has a token that is known in front of the drafts
_LEAST_GAIN = 1.02  # in tokens a second, for which tokens are drafted
_ROUNDING = 1e-9  # tokens
_SAMPLES = 3  # steps of a kind whose time is not its own: what they run is captured, and compiled
_NEW = 0.1  # the part that a step has in the mean of its kind
_OTHERS = 0.05  # the part that it has in those of other kinds: what gets slower does so for all
_SLOPE = 0.25  # a part of a step for each token more, until one of its kind was measured
# Time that drafts may lose in a sequence, in tokens: so much at first, a share of its tokens, and what
# they gained, all together at most so much at once. With 50 tokens and more, that is at most a fiftieth.
_LOSS, _SHARE, _MOST_LOSS = 0.5, 0.01, 4.0
_LEAST_LOSS = 0.05  # where all drafts are rejected: such steps have a bound, whatever clocks say
# Running counts of drafts: what remains of them in a step of drafts and in one without, and how they begin:
# hopeful, so that drafts are tried, and tried again once much is forgotten, as far as the budget goes.
_REMAINS, _REST, _PRIOR, _WEIGHT = 0.9, 0.99, 0.9, 2.0


class Width:
    """Chooses how many tokens are drafted for each row, from 0.

    A sequence pays for rejected draft tokens from a budget of its own. It begins with what those
    before it have left, so that all together lose no more than each could alone. Several share what a
    step of theirs gains and loses: it is as wide as most tokens a second want it, whichever rows have them.

    Args:
        fixed: as many always; None leaves it to the times.

    Attributes:
        is_even: all rows of a step have as many tokens as the one with the fewest; else those that have fewer
            are filled up.
    """

    def __init__(self, fixed: int | None = None):
        self.fixed, self.is_even = fixed, False
        self._seconds: dict[tuple[int, int], float] = {}  # {(rows, tokens of each): the mean of a step}
        self._counts: dict[tuple[int, int], int] = {}
        self._left = _LOSS  # for the next sequence
        self._held: defaultdict[int, Held] = defaultdict(Held)  # counts of each source, over all rows

    def begin(self, row: Row) -> None:
        """A sequence begins."""
        row.budget = max(0.0, self._left)

    def best(self, rows: Sequence[Row], found: Sequence[int], known: Sequence[int] | None = None) -> int:
        """How many tokens a step has behind the first of each row, at most; 0 where drafts do not pay.

        Args:
            found: how many tokens each row can have.
            known: how many of them are no drafts; None: none.
        """
        known = known or [0] * len(rows)
        most = min(MOST, (min if self.is_even else max)(found))
        if self.fixed is not None:
            return min(most, self.fixed)
        many, plain = len(rows), self._seconds.get((len(rows), 1))
        if plain is None or self._counts[many, 1] <= _SAMPLES:
            return 0
        rates, loss = [*map(self._rate, rows)], plain * min(row.budget for row in rows)
        highest = min(MOST, self._measured(many)[-1])  # one more than before
        least = min(known)  # the width without drafts
        times = self._times(many)
        of_rows = [*zip(rates, found, known, strict=True)]
        widths = _affordable(times, least, min(most, highest), loss)
        steps = {width: self._step(width, of_rows, times) for width in widths}
        others = [*steps.values()]  # such as the next ones may be
        if any(known):
            widths = _affordable(times, 0, highest, loss)
            others = [self._step(n, [(rate, n, 0) for rate in rates], times) for n in widths]
        speed = max(_LEAST_GAIN / plain, *(tokens / seconds for tokens, seconds in others))
        gains = {width: tokens - speed * seconds for width, (tokens, seconds) in steps.items()}
        best = max(gains, key=lambda width: gains[width])
        return best if gains[best] > (gains[least] if any(known) else -_ROUNDING) else 0

    def _step(
        self, width: int, rows: Sequence[tuple[float, int, int]], times: Sequence[float]
    ) -> tuple[float, float]:
        """Tokens of each row that a step is expected to give, and its seconds.

        Where rows are even, tokens beside a rejected draft are computed again, by a step without drafts.

        Args:
            rows: the acceptance rate, how many tokens a row can have, how many of them are known.
            times: of steps, by their width.
        """
        tokens, seconds = 0.0, len(rows) * times[width]
        for rate, own, known in rows:
            drafts = min(width, own) - known
            tokens += sum(rate**n for n in range(drafts + 1))
            for held in range(drafts if self.is_even else 0):
                again = (1 - rate) * rate**held
                tokens += again
                seconds += again * times[1 + known + held]
        return tokens / len(rows), seconds / len(rows)

    def took(self, rows: Sequence[Row], tokens: int, seconds: float, made: Sequence[int]) -> None:
        """Notes a step.

        Args:
            tokens: of each row, those that were known included.
            made: new tokens of each row.
        """
        kind = many, _ = len(rows), tokens
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if (plain := self._seconds.get((many, 1))) is not None:
            usual = self._predicted(many, tokens) if count <= _SAMPLES else self._seconds[kind]
            took, new = min(seconds, 2 * usual) / plain, sum(made) / many
            gained = 0.0 if tokens == 1 else new - took if new > 1 else min(new - took, -_LEAST_LOSS)
            change = _SHARE * new + gained
            for row in rows:
                row.budget = min(_MOST_LOSS, row.budget + change)
                self._left = min(_LOSS, self._left + change)
        self._note(kind, seconds)

    def _note(self, kind: tuple[int, int], seconds: float) -> None:
        """Takes the time of a step into the means: one of more tokens is never faster."""
        many, tokens = kind
        before = self._seconds.get(kind, seconds)
        others = [other for other in self._seconds if other[0] == many and other != kind]
        if self._counts[kind] <= _SAMPLES:
            self._seconds[kind] = min(before, seconds)
        else:
            longer = min(seconds / before, 2.0) - 1
            self._seconds[kind] = before * (1 + _NEW * longer)
            for other in others:
                self._seconds[other] *= 1 + _OTHERS * longer
        for other in others:
            nearer = max if other[1] > tokens else min
            self._seconds[other] = nearer(self._seconds[other], self._seconds[kind])

    def verified(self, row: Row, held: int, drafted: int) -> None:
        """Notes how many draft tokens of a row were accepted, up to the first rejected one."""
        tried = held + (held < drafted)
        for counts, remains in ((row.held[row.source], _REMAINS), (self._held[row.source], _REST)):
            counts.hits, counts.tries = remains * counts.hits + held, remains * counts.tries + tried

    def rested(self, row: Row, source: int) -> None:
        """Notes that drafts of a source were not verified: it is forgotten, so that they are tried again."""
        for counts in (row.held[source], self._held[source]):
            counts.hits, counts.tries = _REST * counts.hits, _REST * counts.tries

    def _rate(self, row: Row) -> float:
        """The acceptance rate of a row's drafts of its source, as far as is known."""
        own, others = row.held[row.source], self._held[row.source]
        of_all = (others.hits + _WEIGHT * _PRIOR) / (others.tries + _WEIGHT)
        return (own.hits + _WEIGHT * of_all) / (own.tries + _WEIGHT)

    def _times(self, many: int) -> list[float]:
        """Seconds of a step of so many rows, for each width."""
        return [self._predicted(many, 1 + width) for width in range(MOST + 1)]

    def _predicted(self, many: int, tokens: int) -> float:
        """Seconds of a step: of its kind, or along the line through the nearest ones."""
        if (known := self._seconds.get((many, tokens))) is not None:
            return known
        measured = self._measured(many)
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

    def _measured(self, many: int) -> list[int]:
        """The tokens of each row of steps of so many rows whose times are known, the fewest first."""
        return sorted(tokens for rows, tokens in self._seconds if rows == many)


def _affordable(times: Sequence[float], first: int, last: int, loss: float) -> list[int]:
    """The first width, and those up to the last whose steps take at most so many seconds longer."""
    return [first, *(n for n in range(first + 1, last + 1) if times[n] - times[first] <= loss)]
