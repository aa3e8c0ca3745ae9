"""The pool and its decoding steps, by tables: how answers end, who is evicted, and what a step computes.

No model is called.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from torch_moe_mps.serving.engine import decoding
from torch_moe_mps.serving.engine.groups import Single
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.pool import Pool
from torch_moe_mps.serving.engine.sampling import Sampled
from torch_moe_mps.serving.engine.scheduler import StepTimes
from torch_moe_mps.serving.engine.sequence import Sequence
from torch_moe_mps.serving.prefix_cache.memory import CachedPrefix

PROMPT = torch.tensor([[7, 8, 9]])


@dataclass
class Rows:
    """The calls that a group makes of its cache."""

    lengths: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def admit(self, cache, length, moved) -> None:
        self.lengths.append(length)

    def finish(self, row: int) -> None:
        self.finished.append(row)
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()

    def alone(self, row: int) -> DynamicCache:
        return DynamicCache()

    def is_full(self, tokens: int) -> bool:
        return False


@dataclass
class Executor:
    """Keeps what is cached in a list, or raises."""

    kept: list[list[int]] = field(default_factory=list)
    error: Exception | None = None
    device = torch.device("cpu")
    computed: list[int] = field(default_factory=list)  # sequences of each step

    def rows(self, drafts) -> Rows:
        return Rows()

    def step(self, group, ids) -> SimpleNamespace:
        self.computed.append(len(group.sequences))
        return SimpleNamespace(logits=torch.zeros(len(group.sequences), 1, 8))

    def keep(self, prefill, prefix) -> None:
        if self.error is not None:
            raise self.error
        self.kept.append(prefix.ids.tolist())


def pool_of(error: Exception | None = None) -> tuple[Pool, Executor]:
    executor = Executor(error=error)
    return Pool(executor, None, SimpleNamespace(left=lambda sequence: None)), executor


def sequence_of(pool: Pool, tokens=(), takes=lambda token: False, images=None) -> Sequence:
    """A decoding sequence of the batch; `ends` has the reasons of its end."""
    ends = []
    job = Job({"input_ids": PROMPT}, GenerationConfig(), takes, ends.append)
    prefill = SimpleNamespace(
        cached=CachedPrefix(PROMPT[0], DynamicCache()), prefix_cache=object(), images=images, moved=False
    )
    sampler = SimpleNamespace(ends={1}, max_tokens=5, is_late=False)
    made = Sequence(job, sampler=sampler, prefill=prefill, tokens=[*tokens])
    made.ends = ends
    pool.enter(made, "decoding")
    pool.batch.join(made)
    pool.batch.rows.lengths[-1] += len(made.tokens)
    return made


def raising(token: int) -> bool:
    raise OSError("gone")


# {case: (tokens so far, tokens that come, who takes them, tokens then, reason)}
APPENDED = {
    "goes on": ([], [4, 5], lambda token: False, [4, 5], None),
    "an end token": ([], [4, 1, 5], lambda token: False, [4, 1], "stop"),
    "complete": ([], [4, 5, 6], lambda token: token == 5, [4, 5], "stop"),
    "the longest": ([2, 2, 2], [4, 5, 6], lambda token: False, [2, 2, 2, 4, 5], "length"),
    "complete at its longest": ([2] * 4, [4], lambda token: True, [2] * 4 + [4], "stop"),
    "an error of the sampler": ([], [4, ValueError("no"), 5], lambda token: False, [4], ValueError),
    "who takes it raises": ([], [4, 5], raising, [4], OSError),
}


@pytest.mark.parametrize("case", APPENDED)
def test_tokens_are_appended_until_the_answer_ends(case):
    before, come, takes, after, reason = APPENDED[case]
    pool, _ = pool_of()
    sequence = sequence_of(pool, before, takes)
    got = pool.append_all(sequence, come)
    assert sequence.tokens == after and (got if reason in (None, "stop", "length") else type(got)) == reason
    assert not sequence.ends  # it only says why


@pytest.mark.parametrize(
    ("reason", "kept"), [("stop", [[7, 8, 9, 4, 5]]), ("cancelled", [[7, 8, 9, 4, 5]]), (ValueError(), [])]
)
def test_an_end_keeps_what_is_computed_but_behind_an_error(reason, kept):
    pool, executor = pool_of()
    sequence = sequence_of(pool, [4, 5])
    for _ in range(2):  # once, however often it is told
        pool.end(sequence, reason)
    assert sequence.ends == [reason] and sequence.phase == "ended" and executor.kept == kept
    assert not pool.sequences and not pool.batch.sequences and not pool.is_decoding


def test_a_prefix_that_cannot_be_kept_ends_no_answer():
    pool, _ = pool_of(OSError("full"))
    sequence = sequence_of(pool, [4])
    pool.end(sequence, "length")
    assert sequence.ends == ["length"]


def test_the_last_row_takes_the_place_of_one_that_leaves():
    pool, _ = pool_of()
    a, b, c = (sequence_of(pool, [number] * number) for number in (1, 2, 3))
    pool.end(a, "stop")
    batch = pool.batch
    assert batch.sequences == [c, b] and batch.lengths == [6, 5] and batch.rows.finished == [0]
    assert batch.next_tokens(torch.device("cpu")).tolist() == [[3], [2]] and not a.is_batched
    assert batch.computed(b) == [2, 2]


def test_an_error_of_all_spares_those_that_wait():
    pool, _ = pool_of()
    decoding, waiting = sequence_of(pool), sequence_of(pool)
    waiting.prefill, waiting.phase = None, "waiting"
    pool.groups.append(Single(decoding))
    pool.fail_all(error := ValueError())
    assert decoding.ends == [error] and pool.sequences == [waiting]
    assert len(pool.groups) == 1 and not pool.batch.sequences


@pytest.mark.parametrize(
    ("lengths", "sampled", "ended", "waiting"),
    [
        ([3, 1, 2], None, [1], [0, 2]),  # the shortest
        ([3, 1, 2], [4, 1, 4], [1, 2], [0]),  # one is complete, and its memory may not be enough
        ([4, 1, 2], [4, 4, 4], [0, 1], [2]),
        ([2], None, [0], []),
    ],
)
def test_without_memory_the_shortest_answer_ends(lengths, sampled, ended, waiting):
    pool, _ = pool_of()
    sequences = [sequence_of(pool, [2] * length) for length in lengths]
    if sampled is not None:
        pool.batch.sampled = SimpleNamespace(read=lambda: sampled, leave=lambda row: None)
    pool.preempt(MemoryError())
    assert [n for n, each in enumerate(sequences) if each.ends] == ended
    assert pool.of_phase("waiting") == [sequences[n] for n in waiting] and not pool.batch.sequences


def test_answers_with_images_are_not_computed_again():
    pool, _ = pool_of()
    short, long = sequence_of(pool, [2]), sequence_of(pool, [2, 2], images=object())
    pool.preempt(error := MemoryError())
    assert short.ends == long.ends == [error]


def test_cancelled_answers_end():
    pool, _ = pool_of()
    gone, other = sequence_of(pool), sequence_of(pool)
    gone.job.cancel()
    pool.end_cancelled()
    assert gone.ends == ["cancelled"] and not other.ends


# {case: (longest answers, whose processors see no token behind their last, is read late, sequences of each
# step, tokens after each step)}. Two steps are in flight where tokens are read late.
STEPS = {
    "read at once": ([3], (), False, [1, 1, 1], [[1], [2], [3]]),
    "read late": ([3], (), True, [1, 1, 1], [[0], [1], [2], [3]]),
    "two that end together": ([2, 2], (), True, [2, 2], [[0, 0], [1, 1], [2, 2]]),
    "one goes on": ([1, 3], (), True, [2, 2, 1], [[0, 0], [1, 1], [1, 2], [1, 3]]),
    "one with processors goes": ([1, 3], (0,), True, [2, 1, 1], [[0, 0], [1, 1], [1, 2], [1, 3]]),
    "one with processors goes on": ([1, 3], (1,), True, [2, 2, 1], [[0, 0], [1, 1], [1, 2], [1, 3]]),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_what_each_step_computes(case, monkeypatch):
    longest, processed, late, computed, expected = STEPS[case]
    monkeypatch.setattr(
        decoding, "sample", lambda samplers, logits: Sampled(torch.zeros(2, len(logits)).long(), {}, None)
    )
    nothing = lambda *given: None  # noqa: E731
    drafts = SimpleNamespace(draft=nothing, computed=nothing, took=nothing, left=nothing)
    executor = Executor()
    pool = Pool(executor, None, drafts)
    sequences = [sequence_of(pool, [2]) for _ in longest]  # the prompt's
    for number, (each, most) in enumerate(zip(sequences, longest, strict=True)):
        each.sampler = SimpleNamespace(ends={1}, max_tokens=1 + most, is_late=False)
        each.job.processors.extend([object()] if number in processed else [])
    steps = decoding.Decoding(pool, executor, drafts, None, None, StepTimes())
    steps.reads_late, found = late, []
    while pool.is_decoding:
        steps.step()
        found.append([len(each.tokens) - 1 for each in sequences])
    assert (executor.computed, found) == (computed, expected)
    assert [each.ends for each in sequences] == [["length"]] * len(longest)
