"""The scheduler: which sequence is admitted next, and how much of a prompt is computed between two steps.

It has no tensors and calls no model: `Scheduler.plan` reads the phases and lengths of sequences, a budget of
memory and measured times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LARGEST_CHUNK = 2048  # tokens of a prompt that are computed at once
_LEAST_CHUNK = 64
STEPS = 4  # steps of decoding sequences that a chunk takes, about


class Candidate(Protocol):
    """The part of a `Sequence` that the scheduler reads."""

    @property
    def phase(self) -> str: ...
    @property
    def turn(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def request(self) -> object: ...
    @property
    def alone(self) -> str | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def is_batched(self) -> bool: ...
    @property
    def length(self) -> int: ...


@dataclass
class Times:
    """Seconds of the last step of all decoding sequences, and of a token of a prompt; when the step ended."""

    step: float = 0.0
    token: float = 0.0
    ended: float = 0.0

    def chunk(self, is_decoding: bool) -> int:
        """Tokens of a chunk of a prompt: it takes a few steps of the sequences that wait for it."""
        if not is_decoding:
            return LARGEST_CHUNK
        if self.token == 0.0:
            return LARGEST_CHUNK // 8
        return max(_LEAST_CHUNK, min(LARGEST_CHUNK, int(STEPS * self.step / self.token)))


@dataclass
class Budget:
    """The memory of sequences.

    Args:
        most: sequences at once.
        memory: bytes for sequences and cached prefixes; None is no limit. One sequence runs in any case.
        slots: (rows, tokens of the longest) -> tokens for which a batch of so many rows allocates memory.
        rows: rows -> rows for which it allocates memory.

    Attributes:
        token, drafts: bytes of a token of a sequence, at most, and of its drafts.
        state: bytes of a row, at most, with which draft tokens are taken back from its states.
    """

    most: int
    memory: int | None
    slots: Callable[[int, int], int]
    rows: Callable[[int], int]
    token: float = 0.0
    drafts: float = 0.0
    state: int = 0

    def needed(self, rows: int, longest: int, beside: int) -> float:
        """Bytes of a batch of so many rows, and of so many tokens beside it."""
        tokens = self.slots(rows, longest) + beside
        return (self.token + self.drafts) * tokens + self.state * self.rows(rows)

    def cached(self, sequences: Sequence[Candidate], begins: int = 0) -> int | None:
        """Bytes that are left for cached prefixes, where a prompt of so many tokens begins beside these
        sequences; below 0 where there is no room for it. None: no limit.
        """
        if self.memory is None:
            return None
        batched = [each.length for each in sequences if each.is_batched]
        prompts = [each.prompt_tokens for each in sequences if each.phase == "prefill"]
        prompts += [begins] if begins else []
        beside = [each.length for each in sequences if each.phase == "decoding" and not each.is_batched]
        longest, rows = max([*prompts, *batched], default=0), len(batched) + len(prompts)
        return int(self.memory - self.needed(rows, longest, sum(prompts) + sum(beside)))


@dataclass(frozen=True)
class Plan:
    """The work before the next step.

    Attributes:
        admit: a waiting sequence that begins.
        prefill: whose next chunk is computed, unless an admitted one comes before it.
        passes: whether the admitted one begins before a longer one that waits.
        chunk: tokens of a prompt, at most.
        evict: cached prefixes are evicted until they take at most so many bytes; None evicts none.
    """

    admit: Any = None
    prefill: Any = None
    passes: bool = False
    chunk: int = LARGEST_CHUNK
    evict: int | None = None


class Scheduler:
    """Plans admissions in turns: each request has one answer a turn, the oldest request first.

    While a prompt is computed in chunks, one that fits a single chunk may overtake it, once between two of
    its chunks; and one may begin before a longer one that waits.
    """

    def __init__(self) -> None:
        self._turn = 0  # in which the last sequence has begun
        self._has_overtaken = False  # since the last chunk of the first prompt
        self._has_passed = False  # whether a short prompt has begun before a longer one that waits

    def turn_of(self, place: int) -> int:
        """The turn of a new sequence: its place among the answers to its request, from now on."""
        return self._turn + place

    def plan(self, sequences: Sequence[Any], budget: Budget, times: Times, is_short: bool = False) -> Plan:
        """The next plan for sequences, in the order of entering their phases.

        Args:
            is_short: whether only a prompt of the shortest chunk may begin, next in its turn.
        """
        prefill = [each for each in sequences if each.phase == "prefill"]
        current = prefill[-1] if prefill else None
        chunk = times.chunk(any(each.phase == "decoding" for each in sequences))
        begun = [each for each in sequences if each.has_begun]
        preempted = [each for each in begun if each.phase == "waiting"]
        if preempted and not prefill:
            return Plan(preempted[0], chunk=chunk)
        chosen, passes = None, False
        if len(begun) < budget.most and self._may_begin_beside(prefill):
            waiting = self._in_turn(sequences, budget.most)
            chosen, passes = self._next(waiting, bool(prefill), chunk, is_short)
        if chosen is None:
            return Plan(prefill=current, chunk=chunk)
        room = budget.cached(sequences, chosen.prompt_tokens) if begun else None
        return Plan(chosen if room is None or room >= 0 else None, current, passes, chunk, room)

    def admitted(self, plan: Plan) -> None:
        """Notes that the sequence of a plan begins."""
        self._turn = max(self._turn, plan.admit.turn)
        if plan.prefill is None:
            self._has_passed = plan.passes

    def prefilled(self, sequence: Candidate, sequences: Sequence[Candidate]) -> None:
        """Notes whose chunk is computed."""
        first = next((each for each in sequences if each.phase == "prefill"), sequence)
        self._has_overtaken = sequence is not first

    def _may_begin_beside(self, prefill: Sequence[Candidate]) -> bool:
        """Whether another prompt may begin beside these: beside one, once between two of its chunks."""
        return not prefill or (len(prefill) == 1 and not self._has_overtaken)

    def _next(self, waiting: list[Any], is_reading: bool, chunk: int, is_short: bool) -> tuple[Any, bool]:
        """The next to begin, and whether it passes a longer one: each is passed once."""
        if is_short:
            waiting = [each for each in waiting[:1] if each.prompt_tokens <= _LEAST_CHUNK]
        if waiting and not is_reading and self._has_passed:
            return waiting[0], False
        short = next((each for each in waiting if each.prompt_tokens <= chunk), None)
        if short is not None:
            return short, short is not waiting[0]
        return (None if is_reading or not waiting else waiting[0]), False

    def _in_turn(self, sequences: Sequence[Any], most: int) -> list[Any]:
        """Sequences that may begin, in their order."""
        waiting = [
            each for each in sequences if each.phase in ("waiting", "restoring") and not each.has_begun
        ]
        if not self._later_may_begin(sequences, most):
            waiting = [each for each in waiting if each.place == 0]
        if any(each.phase == "decoding" and each.alone is not None for each in sequences):
            waiting = [each for each in waiting if each.alone is None]
        return sorted(waiting, key=lambda each: each.turn)

    def _later_may_begin(self, sequences: Sequence[Candidate], most: int) -> bool:
        """Whether an answer behind the first one to its request may begin: it makes the others slower.

        Of three rows or more, these leave one to other requests, and half of all while there are others.
        """
        if most <= 2:
            return True
        is_one = len({id(each.request) for each in sequences}) == 1
        begun = [each for each in sequences if each.has_begun]
        later = sum(each.place > 0 for each in begun)
        return len(begun) < most - 1 and (is_one or later < most // 2)
