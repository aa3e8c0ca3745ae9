"""How many tokens are drafted: conversations that are simulated by times of steps and recorded drafts.

`scripts/bench/bench_speculative.py --record` records acceptance in answers of SmolLM2, and step times.
"""

import itertools
import json
import random
from pathlib import Path

import pytest
from measured.apple.tokens import TOKENS
from simulator.apple.facts import GPUS, START_US

from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.engine.width import MOST, Width

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
WRONG = {"found": str(MOST), "held": "0"}
TEXTS = {
    f"{text}, {source}": drafts
    for text, sources in RECORDED["texts"].items()
    for source, drafts in sources.items()
} | {"all wrong": WRONG}


def predicted(model: str, gpu: str) -> list[float]:
    """Times of steps of 1 to 8 tokens by the cost model, in those of one."""
    (token,) = (each for each in TOKENS if each.model == model)
    steps = [token, *(token.verifying(count) for count in range(2, MOST + 2))]
    times = [each.ms(GPUS[gpu], START_US[0], 1.0) for each in steps]
    return [each / times[0] for each in times]


CLOCKS = {
    f"{model}, {gpu}": predicted(model, gpu)
    for model in ("Qwen3-30B-A3B", "Llama 3.1 8B")
    for gpu in ("M1 Max", "M4 Max")
} | {
    "the processor": RECORDED["processor"],
    "each token computed": [1 + 0.75 * n for n in range(MOST + 1)],
}


def conversation(width: Width, clock: list[float], drafts: dict[str, str], tokens: int) -> float:
    """Tokens a second of one of so many tokens, by those without drafts; a recorded answer that is shorter
    comes again and again.
    """
    chance, row = random.Random(0), DraftedSequence([], 0)
    places = [*zip(map(int, drafts["found"]), map(int, drafts["held"]), strict=True)]
    places = [*itertools.islice(itertools.cycle(places), tokens)]
    made, seconds = 0, 0.0
    while made < tokens:
        found, right = places[made]
        count = width.best([found]) if width.pays([row], 0) else 0
        held = min(count, right)
        took = clock[count] * chance.uniform(0.97, 1.03)
        if count:
            width.verified(row, held, count)
        else:
            width.rested(row, 0)
        width.took(1, 1 + count, took)
        made += 1 + held
        seconds += took
    return made / seconds


@pytest.mark.parametrize(("clock", "least"), [("Llama 3.1 8B, M1 Max", 0.98), ("each token computed", 0.8)])
def test_drafts_that_fail_cost_little(clock, least):
    """In a first conversation, and less in those behind it."""
    for drafts in (WRONG, *TEXTS.values()):
        width = Width()
        assert conversation(width, CLOCKS[clock], drafts, 200) > least
        assert conversation(width, CLOCKS[clock], drafts, 200) > 0.95


def test_drafts_that_hold_pay():
    for clock, text, least in (
        ("Llama 3.1 8B, M1 Max", "a text to repeat, look-up", 2.2),
        ("Llama 3.1 8B, M4 Max", "code, a draft of 3 bits", 1.6),
        ("Qwen3-30B-A3B, M4 Max", "a text to repeat, look-up", 1.3),
    ):
        assert conversation(Width(), CLOCKS[clock], TEXTS[text], 600) > least, (clock, text)


def test_drafters_begin_once_the_time_of_a_token_is_known():
    """For each number of rows."""
    width, row = Width(), DraftedSequence([], 0)
    for _ in range(4):
        assert width.pays([row], 0) == []
        width.took(1, 1, 1.0)
    assert width.pays([row], 0) == [row] and width.pays([row, row], 0) == []


def test_pauses_double_and_end_once_drafts_pay():
    """A drafter is tried again after 2, 4, 8 ... steps; others are not paused."""
    width, row, other = Width(), DraftedSequence([], 0), DraftedSequence([], 0)
    for tokens in (1, 1, 1, 1, 5, 5, 5):
        width.took(1, tokens, 1.0 if tokens == 1 else 2.0)
    tries = list[int]()
    for step in range(140):
        if width.pays([row], 0):
            tries.append(step)
            width.verified(row, 0, 4)
        else:
            width.rested(row, 0)
    assert [after - before - 1 for before, after in itertools.pairwise(tries)][-4:] == [8, 16, 32, 64][-4:]
    assert width.pays([row], 1) == [row]
    waits = next(step for step in range(99) if width.pays([other], 0) or width.rested(other, 0))
    assert waits == 16  # a row begins as the one before it has ended
    row.acceptance[0].waits = 0
    for _ in range(20):
        width.verified(row, 4, 4)
    assert width.pays([row], 0) == [row]
    width.verified(row, 0, 4)
    assert row.acceptance[0].pause == 2


def test_a_width_that_is_set():
    width, row = Width(3), DraftedSequence([], 0)
    assert width.pays([row], 0) == [row]  # whether it pays or not
    assert [width.best([found]) for found in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert width.best([9, 2]) == 3
    width.is_even = True
    assert width.best([9, 2]) == 2
