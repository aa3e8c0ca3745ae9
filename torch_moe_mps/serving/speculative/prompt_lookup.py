"""Prompt lookup (n-gram) drafter: continuations of earlier occurrences of the last tokens.

It searches the sequence and cached prefixes, and runs no model.
"""

from array import array
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from ..engine.drafter import DraftedSequence, Drafter
from ..prefix_cache.memory import CachedPrefix, PrefixCache

_GRAM = 3  # tokens that must repeat
_BITS = 21  # for a token in the number that stands for a gram
_CANDIDATES = 8  # places, the last first, of which the one with the longest repetition is taken
_LONGEST = 32  # tokens of a repetition that are compared
_KEPT = 4  # cached prefixes that are searched, the last ones


class Index:
    """Index of the n-grams of a token sequence.

    Attributes:
        tokens: the sequence, which its owner extends.
    """

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self._last: dict[int, int] = {}  # {gram: the last place behind it}
        self._before = array("i")  # for each place the one before it with the same gram, or 0
        self._read = 0

    def read(self) -> None:
        """Indexes newly added tokens, except the last n-gram, which has no continuation yet."""
        end, tokens, last = len(self.tokens), self.tokens, self._last
        begin = max(self._read, _GRAM)
        self._before.extend([0] * (end - len(self._before)))
        for place, gram in enumerate(_grams(tokens[begin - _GRAM : end - 1]), begin):
            self._before[place] = last.get(gram, 0)
            last[gram] = place
        self._read = max(end, self._read)

    def follows(self, tokens: list[int]) -> tuple[int, int]:
        """(position after the longest earlier match of the last tokens, length of the match or 0)."""
        if len(tokens) < _GRAM:
            return 0, 0
        (gram,) = _grams(tokens[-_GRAM:])
        place, best, longest = self._last.get(gram, 0), 0, 0
        for _ in range(_CANDIDATES):
            if place == 0:
                break
            if (length := self._repeats(tokens, place)) > longest:
                best, longest = place, length
            place = self._before[place]
        return best, longest

    def _repeats(self, tokens: list[int], place: int) -> int:
        limit = min(_LONGEST, place, len(tokens))
        count = _GRAM
        while count < limit and self.tokens[place - count - 1] == tokens[-count - 1]:
            count += 1
        return count


def _grams(tokens: list[int]) -> list[int]:
    """Integer key of each n-gram of consecutive tokens."""
    if len(tokens) < _GRAM:
        return []
    ids = np.array(tokens, dtype=np.int64)
    grams: list[int] = (((ids[:-2] << _BITS) + ids[1:-1] << _BITS) + ids[2:]).tolist()
    return grams


class Lookup(Drafter):
    """Drafts by prompt lookup.

    Args:
        prompts: the prefix cache to search in addition to the sequence; None for none.
    """

    is_cheap = True

    def __init__(self, prompts: PrefixCache | None = None):
        self._prompts = prompts
        self._own: WeakKeyDictionary[DraftedSequence, Index] = WeakKeyDictionary()
        self._kept: dict[CachedPrefix, Index] = {}

    def draft(self, rows: Sequence[DraftedSequence]) -> list[list[int]]:
        kept = self._of_kept()
        return [self._of(row, kept) for row in rows]

    def _of(self, row: DraftedSequence, kept: list[Index]) -> list[int]:
        row_index = self._own.get(row)
        if row_index is None:
            row_index = self._own[row] = Index(row.tokens)
        row_index.read()
        best, place, longest = row_index, 0, 0
        for index in (row_index, *kept):
            found, length = index.follows(row.tokens)
            if length > longest:
                best, place, longest = index, found, length
        return best.tokens[place : place + row.max_drafts] if longest else []

    def _of_kept(self) -> list[Index]:
        kept = [] if self._prompts is None else self._prompts.kept[-_KEPT:]
        if [*self._kept] != kept:
            self._kept = {one: self._kept.get(one) or _read(one) for one in kept}
        return [*self._kept.values()]


def _read(kept: CachedPrefix) -> Index:
    index = Index(kept.ids.tolist())
    index.read()
    return index
