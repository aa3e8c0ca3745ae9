"""Several sources of drafts: each has an acceptance of its own, its own states, and fails alone."""

import functools
import logging

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Answered, prompts, settings

import torch_moe_mps
from torch_moe_mps.serving.engine.drafter import DraftedSequence, Drafter
from torch_moe_mps.serving.engine.drafting import Drafting
from torch_moe_mps.serving.engine.width import Width


@functools.cache
def model_of():
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    torch_moe_mps.accelerate(model)
    return model


class Fixed(Drafter):
    """Drafts the same tokens for each row, or those of an answer that is known.

    Attributes:
        asked: how many rows it was asked for.
        taken: the place and the states of each call that was computed.
    """

    def __init__(self, tokens=None, answer=None, states=(), is_cheap=False):
        self.tokens, self.answer, self.states, self.is_cheap = tokens, answer, states, is_cheap
        self.asked, self.taken = 0, []

    def draft(self, rows):
        self.asked += len(rows)
        return [self.tokens or self.answer[len(row.tokens) - row.prompt :] for row in rows]

    def computed(self, row, first, states):
        self.taken.append((first, states))


def timed(wrong: Fixed, right: Fixed, steps: int) -> list[list[int]]:
    """The drafts of a row in steps of which each token more costs a fifth; those of `right` hold."""
    drafting, row, made = Drafting(model_of(), [wrong, right], Width()), DraftedSequence([1, 2, 3], 3), []
    for _ in range(steps):
        (own,) = drafting.draft([row], [0], [7]) or [[]]
        held = len(own) if own[:1] == right.tokens[:1] else 0
        if own:
            drafting.verified([row], [held], [own])
        drafting.width.took(1, 1 + len(own), 1 + 0.2 * len(own))
        made.append(own)
    return made


def test_a_source_that_fails_does_not_drag_the_next_one():
    """The first is asked only as often as its own acceptance says, and the second in all other steps."""
    made = timed(Fixed([9] * 7), Fixed([4] * 7), 200)
    wrong, right = ([own for own in made if own[:1] == [token]] for token in (9, 4))
    assert 0 < len(wrong) < 20 and len(right) > 160


def test_a_row_has_the_drafts_of_the_first_source_that_has_some():
    """And acceptances of rows and sources are counted apart."""

    class Some(Fixed):
        def draft(self, rows):
            self.asked += len(rows)
            return [[7, 7, 7] if row.tokens[-1] == 1 else [] for row in rows]

    first, second = Some(), Fixed([8, 8])
    drafting, rows = (
        Drafting(model_of(), [first, second], Width(3)),
        [DraftedSequence([n], 1) for n in (1, 2)],
    )
    assert drafting.draft(rows, [0, 0], [7, 7]) == [[7, 7, 7], [8, 8]]
    assert (first.asked, second.asked) == (2, 1) and [row.drafter for row in rows] == [0, 1]
    drafting.verified(rows, [2, 0], [[7, 7], [8, 8]])
    assert [{n: own.accepted for n, own in row.acceptance.items() if own.steps} for row in rows] == [
        {0: (1.5 + 2) / 2}, {1: 1.5 / 2},
    ]  # fmt: skip


def test_cheap_sources_alone_are_asked_before_a_token_is_known():
    """Of others, it is enough that they would pay."""
    cheap, other = Fixed([5], is_cheap=True), Fixed([6] * 7)
    drafting = Drafting(model_of(), [cheap, other], Width(2))
    assert drafting.may_pay([DraftedSequence([1], 1)], [0], [7]) and (cheap.asked, other.asked) == (0, 0)
    alone = Drafting(model_of(), [cheap], Width(2))
    assert alone.may_pay([DraftedSequence([1], 1)], [0], [7]) and cheap.asked == 1
    assert not Drafting(model_of(), [], Width(2)).may_pay([DraftedSequence([1], 1)], [0], [7])


@torch.no_grad()
def test_each_source_gets_the_states_it_wants():
    """Side by side in the order of its own; the answer is the one without drafts."""
    model, many = model_of(), prompts(1)
    (answer,) = Answered(model, many, [settings(8)]).answers
    wanted = [(-1,), (), (2, 0)]
    sources = [Fixed(answer=answer, states=states) for states in wanted]
    assert Answered(model, many, [settings(8)], sources, width=2).answers == [answer]
    ids = torch.tensor([[*many[0].tolist(), *answer]])
    hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    for source, states in zip(sources, wanted, strict=True):
        assert bool(source.taken) == bool(states)
        for first, taken in source.taken:
            expected = torch.cat([hidden[state] for state in states], -1)
            torch.testing.assert_close(
                taken, expected[:, first : first + taken.shape[1]], atol=1e-5, rtol=1e-5
            )
    assert sum(taken.shape[1] for _, taken in sources[0].taken) >= len(many[0])


def test_a_source_that_raises_ends_for_one_sequence(caplog):
    """It is asked again for the next one; other sources draft, and one line of the log names it."""
    model, many = model_of(), prompts(1)
    (answer,) = Answered(model, many, [settings(8)]).answers
    bad = Fixed([10**6])
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        found = Answered(model, many * 2, [settings(8)] * 2, [bad, Fixed(answer=answer)], width=2)
    (line,) = [record.getMessage() for record in caplog.records if "drafts no tokens" in record.getMessage()]
    assert line.startswith("torch_moe_mps: Fixed drafts no tokens for a sequence: ValueError: drafts must be")
    assert found.answers == [answer] * 2 and found.batch.drafts.drafting.accepted >= 8 and bad.asked == 2


def test_a_source_that_raises_for_one_of_two_sequences():
    """The other one beside it goes on to have drafts."""

    class Bad(Fixed):
        def draft(self, rows):
            self.asked += len(rows)
            if any(row.tokens[0] == 1 for row in rows):
                raise RuntimeError("of this row")
            return [[7, 7] for _ in rows]

    bad = Bad()
    drafting, rows = Drafting(model_of(), [bad], Width(3)), [DraftedSequence([n], 1) for n in (1, 2)]
    for asked in (4, 5):
        assert drafting.draft(rows, [0, 0], [7, 7]) == [[], [7, 7]] and bad.asked == asked
    assert not drafting.may_pay(rows[:1], [0], [7])
    assert drafting.draft([DraftedSequence([3], 1)], [0], [7]) == [[7, 7]]


def test_a_list_has_names_and_objects():
    with pytest.raises(ValueError, match="or a list of these, got 'looked'"):
        Answered(model_of(), prompts(1), [settings(2)], ["lookup", "looked"])
