"""The scheduler: the next sequence to admit, and the size of the next prefill chunk.

It holds no tensors and calls no model: `Scheduler.plan` reads the phases and lengths of sequences, a memory
budget and measured times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..._limits import LARGEST_CHUNK

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
    def prompt_tokens(self) -> int: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def is_batched(self) -> bool: ...
    @property
    def length(self) -> int: ...


@dataclass
class StepTimes:
    """Measured seconds: the last decoding step, one prompt token, and the time at which the step ended.

    Args:
        largest: tokens of a prefill chunk at most.
    """

    step: float = 0.0
    token: float = 0.0
    ended: float = 0.0
    largest: int = LARGEST_CHUNK

    def chunk(self, is_decoding: bool) -> int:
        """Size of a prefill chunk in tokens, so that it takes about `STEPS` decoding steps."""
        if not is_decoding:
            return self.largest
        if self.token == 0.0:
            return min(self.largest, LARGEST_CHUNK // 8)
        return max(_LEAST_CHUNK, min(self.largest, int(STEPS * self.step / self.token)))


@dataclass
class Budget:
    """Memory budget of sequences and cached prefixes.

    Args:
        max_sequences: maximum number of concurrent sequences.
        memory: bytes for sequences and cached prefixes; None is no limit. One sequence always runs.
        allocated: (rows, longest sequence) -> allocated tokens of a batch.
        rows: number of sequences -> allocated rows of a batch.

    Attributes:
        token, drafts: maximum bytes per token, of the cache and of the drafters.
        state: maximum bytes per row whatever its length: for undoing recurrent state updates of rejected
            draft tokens, and for tokens that are cached dense beside tiles.
    """

    max_sequences: int
    memory: int | None
    allocated: Callable[[int, int], int]
    rows: Callable[[int], int]
    token: float = 0.0
    drafts: float = 0.0
    state: int = 0

    def needed(self, rows: int, longest: int, beside: int) -> float:
        """Bytes of a batch with these rows and longest sequence, and of `beside` tokens outside of it."""
        tokens = self.allocated(rows, longest) + beside
        return (self.token + self.drafts) * tokens + self.state * self.rows(rows)

    def cached(self, sequences: Sequence[Candidate], begins: int = 0) -> int | None:
        """Bytes left for cached prefixes if a prompt of `begins` tokens is admitted beside these sequences.

        Negative if it does not fit. None is no limit.
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
    """Work to do before the next decoding step.

    Attributes:
        admit: the queued sequence to admit.
        prefill: the sequence whose next chunk is computed, unless an admitted one takes precedence.
        passes: True if the admitted sequence overtakes a longer queued one.
        chunk: maximum tokens of the chunk.
        evict: bytes to which cached prefixes are evicted; None evicts none.
    """

    admit: Any = None
    prefill: Any = None
    passes: bool = False
    chunk: int = LARGEST_CHUNK
    evict: int | None = None


class Scheduler:
    """Admits sequences round-robin: one answer per request and turn, the oldest request first.

    A prompt that fits a single chunk may overtake a chunked prefill, once between two of its chunks, and may
    be admitted before a longer queued prompt. Chunks double once nobody decodes: a client that streams one
    answer after the other then waits for a short one.
    """

    def __init__(self) -> None:
        self._chunk = LARGEST_CHUNK  # maximum size of the last chunk
        self._turn = 0  # in which the last sequence has begun
        self._has_overtaken = False  # since the last chunk of the first prompt
        self._has_passed = False  # whether a short prompt has begun before a longer one that waits

    def turn_of(self, place: int) -> int:
        """Admission turn of a new sequence, from its index among the answers to its request."""
        return self._turn + place

    def plan(
        self, sequences: Sequence[Any], budget: Budget, times: StepTimes, is_short: bool = False
    ) -> Plan:
        """Plans the work before the next step; `sequences` are in the order of entering their phases.

        Args:
            is_short: admits only the next sequence in turn, if its prompt fits the smallest chunk.
        """
        prefill = [each for each in sequences if each.phase == "prefill"]
        current = prefill[-1] if prefill else None
        chunk = times.chunk(any(each.phase == "decoding" for each in sequences))
        chunk = min(chunk, 2 * self._chunk)
        begun = [each for each in sequences if each.has_begun]
        preempted = [each for each in begun if each.phase == "waiting"]
        if preempted and not prefill:
            return Plan(preempted[0], chunk=chunk)
        chosen, passes = None, False
        if len(begun) < budget.max_sequences and self._may_begin_beside(prefill):
            waiting = self._in_turn(sequences, budget.max_sequences)
            chosen, passes = self._next(waiting, bool(prefill), chunk, is_short)
        if chosen is None:
            return Plan(prefill=current, chunk=chunk)
        room = budget.cached(sequences, chosen.prompt_tokens) if begun else None
        return Plan(chosen if room is None or room >= 0 else None, current, passes, chunk, room)

    def admitted(self, plan: Plan) -> None:
        """Records that a plan's sequence was admitted."""
        self._turn = max(self._turn, plan.admit.turn)
        if plan.prefill is None:
            self._has_passed = plan.passes

    def prefilled(self, sequence: Candidate, sequences: Sequence[Candidate], chunk: int) -> None:
        """Records the sequence whose chunk is computed, and the chunk's maximum size."""
        self._chunk = chunk
        first = next((each for each in sequences if each.phase == "prefill"), sequence)
        self._has_overtaken = sequence is not first

    def _may_begin_beside(self, prefill: Sequence[Candidate]) -> bool:
        """True if another prompt may start: beside a single prefill, once between two of its chunks."""
        return not prefill or (len(prefill) == 1 and not self._has_overtaken)

    def _next(self, waiting: list[Any], is_reading: bool, chunk: int, is_short: bool) -> tuple[Any, bool]:
        """(next sequence to admit, True if it overtakes a longer one). Each is overtaken at most once."""
        if is_short:
            waiting = [each for each in waiting[:1] if each.prompt_tokens <= _LEAST_CHUNK]
        if waiting and not is_reading and self._has_passed:
            return waiting[0], False
        short = next((each for each in waiting if each.prompt_tokens <= chunk), None)
        if short is not None:
            return short, short is not waiting[0]
        return (None if is_reading or not waiting else waiting[0]), False

    def _in_turn(self, sequences: Sequence[Any], max_sequences: int) -> list[Any]:
        """Admissible sequences in order of admission."""
        waiting = [
            each for each in sequences if each.phase in ("waiting", "restoring") and not each.has_begun
        ]
        if not self._later_may_begin(sequences, max_sequences):
            waiting = [each for each in waiting if each.place == 0]
        return sorted(waiting, key=lambda each: each.turn)

    def _later_may_begin(self, sequences: Sequence[Candidate], max_sequences: int) -> bool:
        """True if a second or later answer to one request may be admitted.

        With three rows or more, these answers leave one row free, and use at most half while other requests
        run.
        """
        if max_sequences <= 2:
            return True
        is_one = len({id(each.request) for each in sequences}) == 1
        begun = [each for each in sequences if each.has_begun]
        later = sum(each.place > 0 for each in begun)
        return len(begun) < max_sequences - 1 and (is_one or later < max_sequences // 2)
