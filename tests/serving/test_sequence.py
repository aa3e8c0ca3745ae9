"""A sequence, by a table: what its phase and its tokens say of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.sequence import Sequence
from torch_moe_mps.serving.prefix_cache.memory import CachedPrefix

PROMPT = torch.tensor([[7, 8, 9]])


def sequence_of(phase="waiting", cached=None, tokens=()) -> Sequence:
    job = Job({"input_ids": PROMPT}, GenerationConfig(), lambda token: False, lambda reason: None, place=2)
    prefill = None if cached is None else SimpleNamespace(cached=CachedPrefix(PROMPT[0, :cached], None))
    return Sequence(job, phase=phase, prefill=prefill, tokens=[*tokens])


# {case: (phase, cached tokens of the prompt, generated tokens, has begun, length)}
STATES = {
    "waits": ("waiting", None, [], False, 0),
    "is restored from the disk": ("restoring", None, [], False, 0),
    "is prefilled": ("prefill", 2, [], True, 2),
    "decodes": ("decoding", 3, [4, 5], True, 5),
    "was preempted": ("waiting", 3, [4], True, 4),
    "decodes by generate": ("decoding", None, [], True, 0),
}


@pytest.mark.parametrize("case", STATES)
def test_what_a_phase_says(case):
    phase, cached, tokens, has_begun, length = STATES[case]
    sequence = sequence_of(phase, cached, tokens)
    assert (sequence.has_begun, sequence.length) == (has_begun, length)
    assert (sequence.place, sequence.prompt_tokens, sequence.request) == (2, 3, sequence.job.request)


def test_the_last_token_is_not_computed_yet():
    assert sequence_of("decoding", 3, [4, 5, 6]).computed_ids().tolist() == [[7, 8, 9, 4, 5]]
    assert sequence_of("decoding", 3, [4]).computed_ids().tolist() == [[7, 8, 9]]


def test_drafters_see_each_token():
    sequence = sequence_of("decoding", 3)
    sequence.append(4)
    sequence.row = DraftedSequence([7, 8, 9, 4], 3)
    sequence.append(5)
    assert sequence.tokens == [4, 5] and sequence.row.tokens == [7, 8, 9, 4, 5]
