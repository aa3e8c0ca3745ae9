"""A small model that drafts: the answers are those of the model alone, in fewer steps."""

import functools
import logging

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.speculative import Answered, prompts, settings

import torch_moe_mps
from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.speculative.draft import Draft


@functools.cache
def model_of(architecture: str, seed: int = 0, **sizes):
    model = eager(tiny_models.tiny_model(architecture, seed=seed, **sizes))
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.slow("answers of a model and its draft, which has windows or states")
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_next"])
def test_a_draft_that_is_the_model_drafts_all(architecture):
    """Its cache is cut where the model goes on otherwise: drawn tokens, and the turn behind an answer."""
    model, many = model_of(architecture), prompts(2)
    configs = [settings(22), settings(16, do_sample=True)]
    plain = Answered(model, many, configs, seeds=[1, 2])
    found = Answered(model, many, configs, model, width=4, seeds=[1, 2])
    assert found.answers == plain.answers
    likeliest, drawn = found.jobs
    assert likeliest.usage.rejected_tokens == 0 and likeliest.usage.accepted_tokens == 16
    assert drawn.usage.rejected_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "length", "sizes"),
    [
        ("llama", 5, {}),
        ("gpt_oss", 100, {"sliding_window": 8}),
        ("qwen3_next", 9, {}),
        ("jamba", 5, {}),
    ],
)
def test_drafts_are_the_likeliest_tokens_of_the_draft(architecture, length, sizes):
    """By its own code without a cache, of a row whose tokens are not those that were drafted.

    Behind a long prompt a window has no token in front of those that it shows.
    """
    model, own = model_of(architecture), tiny_models.tiny_model(architecture, seed=1, **sizes)
    draft = Draft(model, model_of(architecture, 1, **sizes), 1 << 20)
    chance = torch.Generator().manual_seed(3)
    row = DraftedSequence(torch.randint(2, 90, (length,), generator=chance).tolist(), length, max_drafts=4)
    for more in ([], [3], [4, 5, 6], [7]):
        row.tokens += more
        tokens = [*row.tokens]
        for _ in range(4):
            tokens.append(int(own(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert draft.draft([row]) == [tokens[-4:]]
        row.tokens.append(tokens[-4])


def test_wrong_drafts_are_one_line(caplog):
    with pytest.raises(ValueError, match="a draft must have the model's 97 tokens, got 31 others"):
        torch_moe_mps.generate_batch(
            model_of("llama"), prompts(1), settings(2), speculative=model_of("llama", vocab_size=31)
        )
    with caplog.at_level(logging.WARNING, "torch_moe_mps"):
        Answered(model_of("llama"), prompts(1), [settings(3)], model_of("unlimited_ocr"), width=2)
    (line,) = [record.getMessage() for record in caplog.records if "drafts no" in record.getMessage()]
    assert "the draft cannot be cut: a " in line and "cannot be batched" in line
