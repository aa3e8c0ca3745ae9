"""The executor: prompts by chunks, steps of sequences together and alone, beside one call of the model."""

from types import SimpleNamespace

import pytest
import torch
from support.jobs import ids_of, model_of
from transformers import GenerationConfig

from torch_moe_mps.serving.engine.abilities import Abilities
from torch_moe_mps.serving.engine.executor import Executor
from torch_moe_mps.serving.engine.groups import BatchedGroup, Single
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.sequence import Sequence
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def executor_of(states=()) -> Executor:
    return Executor(model_of(), Abilities(model_of()), lambda: states)


def sequence_of(executor: Executor, ids: torch.Tensor, prefix_cache=None) -> Sequence:
    """A sequence that waits for the first chunk of its prompt."""
    job = Job({"input_ids": ids}, GenerationConfig(), lambda token: False, lambda reason: None)
    return Sequence(job, prefill=executor.prefill_of_job(job, prefix_cache))


def prefilled(executor: Executor, sequence: Sequence, chunk: int = 2048) -> torch.Tensor:
    """The logits behind the prompt."""
    while sequence.prefill.chunks:
        out = executor.prefill(sequence.prefill, chunk, lambda: None)
    return out.logits[:, -1]


def logits_of(*ids: torch.Tensor) -> torch.Tensor:
    """The model's own, behind tokens that it computes at once."""
    return torch.cat([model_of()(each).logits[:, -1] for each in ids])


@pytest.mark.parametrize("chunk", [3, 2048])
def test_a_prompt_in_chunks(chunk):
    ids, executor, counts = ids_of(1, 7), executor_of(), []
    sequence = sequence_of(executor, ids)
    while len(sequence.prefill.cached.ids) < 7:
        out = executor.prefill(sequence.prefill, chunk, lambda: None)
        counts.append(len(sequence.prefill.cached.ids))
    assert counts == ([3, 6, 7] if chunk == 3 else [7])
    torch.testing.assert_close(out.logits[:, -1], logits_of(ids))


def test_a_step_of_sequences_of_two_lengths_and_of_one_alone():
    executor, prompts, next_tokens = executor_of(), [ids_of(1, 5), ids_of(2, 9)], torch.tensor([[3], [4]])
    wholes = [torch.cat((ids, token[None]), 1) for ids, token in zip(prompts, next_tokens, strict=True)]
    group = BatchedGroup(executor.rows(SimpleNamespace(deferrable={})))
    for ids in prompts:
        sequence = sequence_of(executor, ids)
        prefilled(executor, sequence)
        group.join(sequence)
    out = executor.step(group, next_tokens)
    torch.testing.assert_close(out.logits[:, -1], logits_of(*wholes))
    assert group.lengths == [6, 10]
    alone = sequence_of(executor, prompts[1])
    prefilled(executor, alone)
    single = Single(alone)
    torch.testing.assert_close(executor.step(single, next_tokens[1:]).logits[:, -1], logits_of(wholes[1]))
    assert single.lengths == [10]


def test_a_preempted_sequence_computes_its_answer_as_its_prompt():
    executor, ids = executor_of(), ids_of(1, 5)
    sequence = sequence_of(executor, ids)
    sequence.tokens = [3, 4, 5]
    sequence.prefill = executor.prefill_again(sequence)
    got = prefilled(executor, sequence)
    torch.testing.assert_close(got, logits_of(torch.cat((ids, torch.tensor([[3, 4]])), 1)))


def test_a_kept_prefix_is_not_computed_again():
    executor, ids, cache = executor_of(), ids_of(1, 40), PrefixCache(1 << 30)
    first = sequence_of(executor, ids[:, :30], cache)
    prefilled(executor, first)
    executor.keep(first.prefill, first.prefill.cached)
    again = sequence_of(executor, ids, cache)
    assert len(again.prefill.cached.ids) == 30
    torch.testing.assert_close(prefilled(executor, again), logits_of(ids))
    assert not len(sequence_of(executor, ids).prefill.cached.ids)  # without that cache


@pytest.mark.parametrize(("states", "asked"), [((), None), ((1,), 1), ((0, 2), (0, 2))])
def test_hidden_states_are_asked_for_drafters(states, asked, monkeypatch):
    executor, given = executor_of(states), []
    monkeypatch.setattr(executor, "_model", lambda **inputs: given.append(inputs) or SimpleNamespace())
    monkeypatch.setattr("torch_moe_mps.serving.engine.executor.cache_argument", lambda model, cache: {})
    executor._call(None, input_ids=ids_of(1, 1))
    assert given[0].get("output_hidden_states") == asked
