"""The scheduler, by tables: which sequence is admitted, whose chunk comes next, and what is evicted."""

from dataclasses import dataclass, field

import pytest

from torch_moe_mps.serving.engine.scheduler import Budget, Scheduler, StepTimes


@dataclass(eq=False)
class One:
    """A sequence as the scheduler sees it."""

    name: str
    phase: str = "waiting"
    prompt_tokens: int = 10
    turn: int = 0
    place: int = 0
    has_begun: bool = field(init=False)
    is_batched: bool = field(init=False)
    request: object = None
    tokens: int = 0

    def __post_init__(self):
        self.has_begun = self.phase in ("prefill", "decoding") or self.tokens > 0
        self.is_batched = self.phase == "decoding"
        self.request = self.request or object()

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.tokens


def decoding(count: int = 1) -> list[One]:
    return [One(f"d{n}", "decoding", tokens=5) for n in range(count)]


def budget(most: int = 8, memory: int | None = None) -> Budget:
    """A token takes a byte, and so many rows have exactly the tokens of the longest."""
    return Budget(most, memory, lambda rows, tokens: rows * tokens, lambda rows: rows, token=1.0)


MEASURED = StepTimes(step=0.025, token=0.001)  # chunks of 100 tokens beside decoding sequences
LONG = {"prompt_tokens": 500}

# {case: (sequences, most, admitted, whose chunk comes if it is not admitted)}
CASES = {
    "none": ([], 8, None, None),
    "the oldest": ([One("a"), One("b")], 8, "a", None),
    "the earlier turn": ([One("a", turn=2), One("b", turn=1)], 8, "b", None),
    "a short one before a long one": ([*decoding(), One("a", **LONG), One("b")], 8, "b", None),
    "a long one where nobody waits": ([One("a", **LONG), One("b")], 8, "a", None),
    "none beside as many as may be": ([*decoding(2), One("a")], 2, None, None),
    "a short one between two chunks": ([*decoding(), One("p", "prefill", 500), One("a")], 8, "a", "p"),
    "no long one between chunks": ([*decoding(), One("p", "prefill", 500), One("a", **LONG)], 8, None, "p"),
    "no third prompt": ([One("p", "prefill", 500), One("q", "prefill"), One("a")], 8, None, "q"),
    "a preempted one first": ([One("a"), One("p", tokens=4)], 8, "p", None),
    "a preempted one behind a prompt that is computed": (
        [*decoding(), One("q", "prefill", 500), One("p", tokens=4)],
        8,
        None,
        "q",
    ),
    "first answers where half are later": (
        [*(One(f"d{n}", "decoding", place=n) for n in (1, 2)), One("a", place=3), One("b", turn=9)],
        4,
        "b",
        None,
    ),
    "one whose prefix is restored keeps its turn": ([One("a", "restoring"), One("b")], 8, "a", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_is_next(case):
    sequences, most, admitted, chunk = CASES[case]
    plan = Scheduler().plan(sequences, budget(most), MEASURED)
    assert (getattr(plan.admit, "name", None), getattr(plan.prefill, "name", None)) == (admitted, chunk)


def test_a_long_prompt_is_passed_once():
    """By one that begins before it, and by one between two of its chunks."""
    scheduler, others = Scheduler(), decoding()
    long, first, second = One("long", **LONG), One("first"), One("second")
    plan = scheduler.plan([*others, long, first, second], budget(), MEASURED)
    assert plan.admit is first and plan.passes
    scheduler.admitted(plan)
    plan = scheduler.plan([*others, long, second], budget(), MEASURED)
    assert plan.admit is long and not plan.passes
    scheduler.admitted(plan)
    long.phase, long.has_begun = "prefill", True
    plan = scheduler.plan([*others, long, second], budget(), MEASURED)
    assert plan.admit is second and plan.prefill is long
    second.phase, second.has_begun = "prefill", True
    scheduler.prefilled(second, [*others, long, second], 100)
    third = One("third")
    assert scheduler.plan([*others, long, third], budget(), MEASURED).admit is None
    scheduler.prefilled(long, [*others, long], 100)
    assert scheduler.plan([*others, long, third], budget(), MEASURED).admit is third


# {(memory, prompt): (whether it is admitted, bytes that cached prefixes may keep)}, beside one of 15 tokens:
# two rows of the longest, and the prompt beside them until it joins.
MEMORY = {
    (None, 20): (True, None),
    (100, 20): (True, 100 - (2 * 20 + 20)),
    (60, 20): (True, 0),
    (59, 20): (False, -1),
    (59, 10): (True, 59 - (2 * 15 + 10)),
}


@pytest.mark.parametrize("case", MEMORY, ids=str)
def test_prefixes_are_evicted_for_a_sequence_that_fits(case):
    memory, prompt = case
    plan = Scheduler().plan([*decoding(), One("a", prompt_tokens=prompt)], budget(8, memory), MEASURED)
    assert (plan.admit is not None, plan.evict) == MEMORY[case]


def test_sequences_that_decode_alone_take_memory():
    """Beside a batch of 2 x 15 tokens, one of its own of 25: 45 of 100 bytes are left for cached prefixes."""
    alone = One("g", "decoding", prompt_tokens=20, tokens=5)
    alone.is_batched = False
    batched = decoding(2)
    assert budget(8, 100).cached([*batched, alone]) == 100 - 2 * 15 - 25
    assert budget(8, 100).cached(batched) == 100 - 2 * 15


def test_one_sequence_runs_whatever_it_takes():
    plan = Scheduler().plan([One("a", prompt_tokens=1000)], budget(8, 1), MEASURED)
    assert plan.admit is not None and plan.evict is None


def test_turns_go_on_from_what_has_begun():
    scheduler = Scheduler()
    scheduler.admitted(scheduler.plan([One("a", turn=3)], budget(), MEASURED))
    assert [scheduler.turn_of(place) for place in (0, 2)] == [3, 5]


def test_a_chunk_takes_as_long_as_some_steps():
    times = StepTimes()
    assert times.chunk(is_decoding=False) == 2048  # nobody waits
    assert times.chunk(is_decoding=True) == 256  # nothing is measured yet
    times.step, times.token = 0.025, 0.001
    assert times.chunk(is_decoding=True) == 100
    times.step = 1e-6
    assert times.chunk(is_decoding=True) == 64
    assert StepTimes(largest=128).chunk(is_decoding=False) == StepTimes(largest=128).chunk(True) == 128


def test_chunks_double_once_nobody_decodes():
    """A client that streams one answer after the other does not wait for a chunk of the largest size."""
    scheduler, long, other = Scheduler(), One("p", "prefill", 30_000), decoding()
    chunks = []
    for beside in ([], other, [], [], [], [], [], [], other, []):
        plan = scheduler.plan([*beside, long], budget(), MEASURED)
        scheduler.prefilled(long, [long], plan.chunk)
        chunks.append(plan.chunk)
    assert chunks == [2048, 100, 200, 400, 800, 1600, 2048, 2048, 100, 200]


def test_the_scheduler_needs_no_torch():
    import ast
    import inspect

    from torch_moe_mps.serving.engine import scheduler

    tree = ast.parse(inspect.getsource(scheduler))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {"collections.abc", "dataclasses", "typing", "_limits"}
