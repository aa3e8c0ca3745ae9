"""Number of draft tokens per step, adapted to the acceptance rate."""

from collections import defaultdict
from collections.abc import Sequence

from ..._limits import MOST_TOKENS
from .drafter import Acceptance, DraftedSequence

MOST = MOST_TOKENS - 1  # a step has a token that is known in front of the drafts
USUAL = 4  # draft tokens of a step, unless somebody says how many
_LEAST_GAIN = 1.02  # in tokens a second, for which tokens are drafted
_SAMPLES = 3  # steps of a kind whose time is not its own: what they run is captured, and compiled
_NEW, _LAST = 0.1, 0.2  # the part that a step has in the mean time of its kind, and in the acceptance
_PAUSES, _FIRST = 64, 16  # steps in front of a try of a drafter that does not pay, at most; and of the first


class Width:
    """Chooses the number of draft tokens of each row, possibly 0.

    A drafter is used for a row while drafted steps are expected to yield more tokens per second than plain
    ones, from recent acceptance and the measured times of both. Otherwise it pauses with exponential backoff.

    Args:
        fixed: always this number; None is USUAL, for drafters that pay.

    Attributes:
        is_even: True if all rows are cut to the fewest tokens of a row; otherwise shorter rows are padded.
    """

    def __init__(self, fixed: int | None = None):
        self.tokens, self.is_even = fixed or USUAL, False
        self._is_gated = fixed is None
        self._seconds: dict[tuple[int, bool], float] = {}  # {(rows, with drafts): the mean of a step}
        self._counts: defaultdict[tuple[int, bool], int] = defaultdict(int)
        self._all = defaultdict[int, Acceptance](lambda: Acceptance(self.tokens / 2))  # by drafter

    def best(self, found: Sequence[int]) -> int:
        """Number of tokens per row after the first one of a step.

        Args:
            found: number of known and draft tokens of each row.
        """
        return min(self.tokens, (min if self.is_even else max)(found))

    def pays(self, rows: Sequence[DraftedSequence], drafter: int) -> list[DraftedSequence]:
        """Rows for which a drafter currently pays or is due for a retry."""
        if not self._is_gated:
            return [*rows]
        if self._counts[len(rows), False] <= _SAMPLES:
            return []
        plain = self._seconds[len(rows), False]
        cost = self._seconds.get((len(rows), True), plain) / plain
        return [row for row in rows if self._pays(row, drafter, cost)]

    def _pays(self, row: DraftedSequence, drafter: int, cost: float) -> bool:
        acceptance = self._of(row, drafter)
        if 1 + acceptance.accepted >= _LEAST_GAIN * cost:
            acceptance.pause = self._all[drafter].pause = 1
            return True
        return acceptance.waits == 0

    def took(self, many: int, tokens: int, seconds: float) -> None:
        """Records the duration of a step with `many` rows and `tokens` tokens each."""
        kind = many, tokens > 1
        self._counts[kind] += 1
        before = self._seconds.get(kind, seconds)
        if self._counts[kind] <= _SAMPLES:
            self._seconds[kind] = min(before, seconds)
        else:
            self._seconds[kind] = before + _NEW * (min(seconds, 2 * before) - before)

    def verified(self, row: DraftedSequence, accepted: int, drafted: int) -> None:
        """Updates acceptance statistics after a verification step."""
        wrong = accepted < drafted
        gain = accepted - (wrong and self.is_even)  # tokens beside a rejected draft are computed again
        acceptance = self._of(row, row.drafter)
        for each in (acceptance, self._all[row.drafter]):
            each.steps += 1
            each.accepted += max(_LAST, 1 / (1 + each.steps)) * (gain - each.accepted)
            each.waits = each.pause = min(_PAUSES, 2 * each.pause)

    def rested(self, row: DraftedSequence, drafter: int) -> None:
        """Counts a step without drafts of a drafter, for one row."""
        acceptance = self._of(row, drafter)
        acceptance.waits = max(0, acceptance.waits - 1)

    def _of(self, row: DraftedSequence, drafter: int) -> Acceptance:
        if drafter not in row.acceptance:  # it begins as the rows before it have ended
            before = self._all[drafter]
            waits = min(before.pause, _FIRST) if before.steps else 0
            row.acceptance[drafter] = Acceptance(before.accepted, pause=before.pause, waits=waits)
        return row.acceptance[drafter]
