"""How many tokens are drafted: conversations that are simulated by times of steps and recorded drafts.

`scripts/bench/bench_speculative.py --record` records acceptance in answers of SmolLM2, and step times.
"""

import itertools
import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from measured.apple.tokens import TOKENS
from simulator.apple.facts import GPUS, START_US
from support.sweep import in_sweep, rows_in_sweep

from torch_moe_mps.serving.speculative.drafter import Held, Row
from torch_moe_mps.serving.speculative.width import MOST, Width

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


class Simulated(NamedTuple):
    """A conversation.

    Attributes:
        ratio: tokens a second, by those without drafts.
        verified: steps that had drafts.
        wrong: those of them in which none held.
    """

    ratio: float
    verified: int
    wrong: int


def conversation(
    width: Width, clock: list[float], drafts: dict[str, str], tokens: int, seed: int = 0
) -> Simulated:
    """One of so many tokens; a recorded answer that is shorter comes again and again."""
    chance, row = random.Random(seed), Row([], 0)
    places = [*zip(map(int, drafts["found"]), map(int, drafts["held"]), strict=True)]
    places = [*itertools.islice(itertools.cycle(places), tokens)]
    width.begin(row)
    made, seconds, verified, wrong = 0, 0.0, 0, 0
    while made < tokens:
        found, right = places[made]
        count = width.best([row], [found])
        held = min(count, right)
        took = clock[count] * chance.uniform(0.97, 1.03)
        if count:
            width.verified(row, held, count)
            verified, wrong = verified + 1, wrong + (held == 0)
        else:
            width.rested(row, 0)
        width.took([row], 1 + count, took, [1 + held])
        made += 1 + held
        seconds += took
    return Simulated(made / seconds, verified, wrong)


OFTEN = ("Llama 3.1 8B, M1 Max", "each token computed")  # where a step of several costs little, and most


@pytest.mark.parametrize(
    ("clock", "tokens"),
    rows_in_sweep(itertools.product(CLOCKS, [50, 192, 1000]), [*itertools.product(OFTEN, [50, 192])]),
)
def test_drafts_never_cost(clock, tokens):
    """Each conversation alone, and after those that paid: at least 0.98 of the speed without drafts."""
    for text, drafts in TEXTS.items():
        for seed in range(3):
            found = conversation(Width(), CLOCKS[clock], drafts, tokens, seed)
            assert found.ratio > 0.98, (text, seed, found)
    width = Width()
    for number, (text, drafts) in enumerate([*TEXTS.items()] * 3):
        found = conversation(width, CLOCKS[clock], drafts, tokens, number)
        assert found.ratio > 0.98, (number, text, found)


@pytest.mark.parametrize("clock", CLOCKS)
def test_wrong_drafts_are_few(clock):
    """As many as half a token and a hundredth of the tokens pay, each a twentieth at least, and one more; the
    next conversations begin with what is left.
    """
    width, cost = Width(), max(0.05, 0.97 * CLOCKS[clock][1] - 1)
    for number in range(3):
        found = conversation(width, CLOCKS[clock], WRONG, 1000)
        assert 0 < found.wrong <= 1 + (0.5 + 0.01 * 1000) / cost, number
    short = [conversation(width, CLOCKS[clock], WRONG, 20).wrong for _ in range(20)]
    assert sum(short) <= 1 + (0.5 + 2 * 0.01 * 20 * 20) / cost


def test_a_clock_that_is_wrong_at_first_makes_no_wrong_draft_pay():
    """Steps take twice as long while something else runs; then two tokens seem to cost less than one."""
    width, row, wrong = Width(), Row([], 0), 0
    width.begin(row)
    for number in range(400):
        count = width.best([row], [MOST])
        seconds = (1 + 0.1 * count) * (2.0 if number < 8 else 1.0)
        if count:
            width.verified(row, 0, count)
            wrong += 1
        else:
            width.rested(row, 0)
        width.took([row], 1 + count, seconds, [1])
    assert 0 < wrong <= 1 + (0.5 + 0.01 * 400) / 0.05


def test_drafts_that_hold_pay():
    """Where they do, close to what the best of all widths would give."""
    for clock, text, least in (
        ("Llama 3.1 8B, M1 Max", "a text to repeat, look-up", 2.7),
        ("Llama 3.1 8B, M4 Max", "code, a draft of 3 bits", 1.8),
        ("Qwen3-30B-A3B, M4 Max", "a text to repeat, look-up", 1.4),
        ("Qwen3-30B-A3B, M1 Max", "code to change, look-up", 1.3),
    ):
        found = conversation(Width(), CLOCKS[clock], TEXTS[text], 600)
        assert found.ratio > least, (clock, text, found)


@pytest.mark.parametrize(
    ("held", "least"), [((3, 0), 1.7), ((3, 3), 2.5), ((0, 0, 0), 0.98), ((7, 0, 0, 0), 1.3)]
)
def test_conversations_share_a_step(held, least):
    """One whose drafts hold pays for others whose do not; all wrong ones cost no more than one's."""
    clock, width, rows = CLOCKS["Llama 3.1 8B, M4 Max"], Width(), [Row([], 0) for _ in held]
    for row in rows:
        width.begin(row)
    seconds, made = 0.0, 0
    for _ in range(400):
        count = width.best(rows, [MOST] * len(rows))
        new = [1 + min(count, own) for own in held]
        for row, own in zip(rows, held, strict=True):
            if count:
                width.verified(row, min(count, own), count)
            else:
                width.rested(row, 0)
        width.took(rows, 1 + count, clock[count], new)
        made, seconds = made + sum(new), seconds + clock[count]
    assert made / len(rows) / seconds > least


def forgetting(width: Width, clock: list[float], rate: float, wide: bool = True) -> float:
    """Speed, by that without drafts, where a step with a wrong draft is computed again.

    Args:
        rate: the part of accepted draft tokens.
        wide: drafts follow the tokens that are known.
    """
    row, chance = Row([], 0), random.Random(1)
    width.begin(row)
    width.is_even = True
    seconds, made, known = 0.0, 0, 0
    while made < 3000:
        count = 0 if known and not wide else width.best([row], [MOST], [known])
        drafts, tokens = max(0, count - known), max(count, known)
        held = next((n for n in range(drafts) if chance.random() > rate), drafts)
        if drafts:
            width.verified(row, held, drafts)
        else:
            width.rested(row, 0)
        width.took([row], 1 + tokens, clock[tokens], [1 + held])
        known = known + 1 + held if held < drafts else 0
        made, seconds = made + 1 + held, seconds + clock[tokens]
    return made / seconds


@pytest.mark.parametrize("clock", in_sweep(CLOCKS, OFTEN))
def test_drafts_follow_tokens_that_are_known(clock):
    """Where states hold all tokens: faster where a step of several costs little, and nowhere slower."""
    for rate in (0.0, 0.3, 0.5, 0.7, 0.85):
        wide, narrow = (forgetting(Width(), CLOCKS[clock], rate, wide) for wide in (True, False))
        assert wide > 0.98 and wide > 0.98 * narrow
        if clock.startswith("Llama") and rate:
            assert wide > 1.1 * narrow


def test_a_width_that_is_fixed():
    width = Width(3)
    assert [width.best([Row([], 0)], [found]) for found in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert width.best([Row([], 0), Row([], 0)], [9, 2]) == 3
    width.is_even = True
    assert width.best([Row([], 0), Row([], 0)], [9, 2]) == 2


def test_tokens_are_known_before_a_step_of_so_many_was_measured():
    """The other conversation of a step has ended."""
    width, row = Width(), Row([], 0, budget=4.0)
    for _ in range(4):
        width.took([row], 1, 1.0, [1])
    width.is_even = True
    assert width.best([row], [7], [5]) == 0


def test_no_width_before_the_time_of_a_token_is_known():
    width, row = Width(), Row([], 0)
    row.held[0] = Held(9.0, 9.0)
    width.begin(row)
    for _ in range(4):
        assert width.best([row], [7]) == 0
        width.took([row], 1, 1.0, [1])
    assert width.best([row], [7]) > 0
    assert width.best([row, row], [7, 7]) == 0  # steps of two rows have a time of their own
