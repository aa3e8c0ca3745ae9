"""The cached prefix of a turn is what the sequence's cache held, and no two answers write one cache."""

import pytest
import torch
from support.jobs import Asked, ids_of, model_of, run
from support.sweep import in_sweep

from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

# Layers that all sequences share, and layers that each has for itself.
SEPARATE = ["glm5_next", "qwen4_exp", "minimax_m3_vl"]
# Experts that are recognised by trial.
RECOGNISED = ["dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7"]
ARCHITECTURES = in_sweep(["qwen3_moe", *SEPARATE, *RECOGNISED], ("qwen3_moe", "qwen4_exp"))
LENGTH = 40


def turn(asked: Asked, number: int, more: int = 3) -> torch.Tensor:
    """A prompt that goes on behind an answer."""
    return torch.cat((asked.job.inputs["input_ids"], torch.tensor([asked.tokens]), ids_of(number, more)), 1)


@pytest.mark.slow("several answers of two models")
@pytest.mark.parametrize("late", in_sweep((False, True), (True,)), ids=["at once", "late"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_kept_of_an_answer(architecture, late):
    """Whichever way it ends, and whether the host reads a token before the next is computed, as it does not
    on mps: all that was computed is kept, and the next turn is the model's own.
    """
    model, prompts = model_of(architecture), PrefixCache(1 << 30)
    batch = Engine(model, prompts, 4)
    batch.decoding.reads_late = late
    length, stops, gone, ends = (Asked(ids_of(number, LENGTH + number), 7) for number in range(4))
    stops.until = lambda token: len(stops.tokens) == 4
    gone.until = lambda token: len(gone.tokens) == 3 and gone.job.cancel()
    ends.config.eos_token_id = ends.expected(model)[4]
    asked = (length, stops, gone, ends)
    run(batch, *asked)
    assert [each.reasons[0] for each in asked] == ["length", "stop", "cancelled", "stop"]
    for kept in prompts.kept:
        assert len(kept.ids) == kept.cache.get_seq_length()
    for number, each in enumerate(asked):
        second = Asked(turn(each, number), 4)
        run(batch, second)
        computed = LENGTH + number + len(each.tokens)
        assert second.job.usage.cached_tokens >= computed - 1, number
        assert second.tokens == second.expected(model), number


@pytest.mark.slow("several answers of two models")
@pytest.mark.parametrize("late", in_sweep((False, True), (True,)), ids=["at once", "late"])
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", *SEPARATE], ("qwen3_moe",)))
def test_answers_that_begin_with_anothers_prompt(architecture, late):
    """While that one is being generated, and again and again: each is the one alone."""
    model = model_of(architecture)
    batch = Engine(model, PrefixCache(1 << 30), 6)
    batch.decoding.reads_late = late
    first = Asked(ids_of(1, LENGTH), 14)
    asked = [first]
    batch.submit(first.job)
    for number in range(4):
        batch.step()
        ids = torch.cat((first.job.inputs["input_ids"], ids_of(number, number)), 1)
        asked.append(Asked(ids, 9 + number))
        batch.submit(asked[-1].job)
    run(batch)
    for number, each in enumerate(asked):
        assert each.tokens == each.expected(model), number


@pytest.mark.slow("a model's own answers beside them")
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "deepseek_v4", *SEPARATE], ("deepseek_v4",)))
def test_a_short_prompt_that_begins_as_a_kept_one(architecture):
    """Shorter than a window, which is 5 of DeepSeek-V4: compressed keys give no token back all the same."""
    model = model_of(architecture)
    batch = Engine(model, PrefixCache(1 << 30), 2)
    for number, shared in enumerate((0, 2, 1)):
        ids = torch.cat((ids_of(9, 3)[:, :shared], ids_of(number, 3 - shared)), 1)
        asked = Asked(ids, 1 + number)
        run(batch, asked)
        assert asked.reasons == ["length"] and asked.tokens == asked.expected(model)
        run(batch, again := Asked(ids_of(9, 3), 1))
        assert again.reasons == ["length"]
