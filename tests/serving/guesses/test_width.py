"""How many tokens are guessed: conversations that are simulated by times of steps and guesses that hold."""

import random

import pytest

from torch_moe_mps.serving.guesses.source import Row
from torch_moe_mps.serving.guesses.width import MOST, Width

# Times of a step of 1 to 8 tokens, in those of one: a dense model, a Mixture of Experts by the cost model for
# an M4 Max, and a processor that computes each token.
CLOCKS = {
    "dense": [1 + 0.03 * n for n in range(8)],
    "experts": [1.0, 1.57, 2.0, 2.4, 2.8, 3.15, 3.5, 3.8],
    "processor": [1 + 0.75 * n for n in range(8)],
}
# In how many steps there are guesses, and the probability that each holds.
TEXTS = {
    "prose": (0.3, 0.1),
    "code": (0.5, 0.75),
    "JSON": (0.6, 0.85),
    "repeats": (0.95, 0.97),
    "draft": (1.0, 0.65),
    "wrong": (1.0, 0.0),
}


def ratio(width: Width, clock: list[float], text: str, tokens: int, seed: int) -> float:
    """Tokens a second of a conversation, by those without guesses."""
    chance, row = random.Random(seed), Row([], 0)
    often, holds = TEXTS[text]
    width.begin()
    made, seconds = 0, 0.0
    while made < tokens:
        found = MOST if chance.random() < often else 0
        count = width.best([row], [found])
        held = 0
        while held < count and chance.random() < holds:
            held += 1
        took = clock[count] * chance.uniform(0.97, 1.03)
        if count:
            width.verified(row, held, count)
        else:
            width.rested(row)
        width.took(1, 1 + count, took, 1 + held)
        made += 1 + held
        seconds += took
    return made / seconds


@pytest.mark.parametrize("clock", CLOCKS)
def test_guesses_never_cost(clock):
    """Each conversation alone and after those that paid: at least 0.98 of the speed without guesses."""
    for text in TEXTS:
        for seed in range(5):
            assert ratio(Width(), CLOCKS[clock], text, 400, seed) > 0.98, (text, seed)
    width = Width()
    for number, text in enumerate([*TEXTS] * 3):
        assert ratio(width, CLOCKS[clock], text, 400, number) > 0.98, (number, text)


def test_guesses_that_hold_pay():
    """Where they do, close to what the best of all widths would give."""
    for clock, text, least in (
        ("dense", "repeats", 5.0),
        ("dense", "draft", 2.0),
        ("experts", "repeats", 1.6),
        ("experts", "JSON", 1.08),
    ):
        ratios = [ratio(Width(), CLOCKS[clock], text, 600, seed) for seed in range(5)]
        assert sum(ratios) / 5 > least, (clock, text, ratios)


def test_a_width_that_is_fixed():
    width = Width(3)
    assert [width.best([Row([], 0)], [found]) for found in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert width.best([Row([], 0), Row([], 0)], [9, 2]) == 2


def test_no_width_before_the_time_of_a_token_is_known():
    width, row = Width(), Row([], 0, hits=9.0, tries=9.0)
    for _ in range(4):
        assert width.best([row], [7]) == 0
        width.took(1, 1, 1.0, 1)
    assert width.best([row], [7]) > 0
    assert width.best([row, row], [7, 7]) == 0  # steps of two rows have a time of their own
