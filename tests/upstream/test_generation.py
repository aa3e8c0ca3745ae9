"""The loop of `generate`, as far as tokens are drawn, counted and kept by ours."""

import inspect

import pytest
import torch
from support import tiny_models
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

IDS = torch.arange(2, 7)[None]
HOW = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return tiny_models.other_model("cwm")


def noted(monkeypatch, name: str) -> list:
    """Calls of a method of GenerationMixin: (arguments by place, by name)."""
    own, calls = getattr(GenerationMixin, name), []

    def call(self, *args, **kwargs):
        calls.append((args, kwargs))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, name, call)
    return calls


@pytest.mark.parametrize("draws", [False, True])
def test_tokens_come_from_one_method(model, monkeypatch, draws):
    calls = noted(monkeypatch, "_sample")
    model.generate(IDS, do_sample=draws, **HOW)
    ((args, kwargs),) = calls
    assert len(args) == 1 and torch.equal(args[0], IDS)
    assert kwargs.keys() >= {"logits_processor", "generation_config", "stopping_criteria"}
    assert isinstance(kwargs["logits_processor"], LogitsProcessorList)


def test_arguments_of_the_next_token_come_from_one_method(model, monkeypatch):
    calls = noted(monkeypatch, "_update_model_kwargs_for_generation")
    model.generate(IDS, do_sample=False, **HOW)
    assert len(calls) == 3
    for args, kwargs in calls:
        outputs = args[0]
        passed = args[1] if len(args) > 1 else kwargs["model_kwargs"]
        assert outputs["logits"].shape[0] == 1 and "attention_mask" in passed


def test_processors_have_their_numbers(model, monkeypatch):
    calls = noted(monkeypatch, "_sample")
    model.generate(IDS, do_sample=True, temperature=0.5, top_k=3, top_p=0.8, min_p=0.1, **HOW)
    known = {
        TemperatureLogitsWarper: ("temperature", 0.5),
        TopKLogitsWarper: ("top_k", 3),
        TopPLogitsWarper: ("top_p", 0.8),
        MinPLogitsWarper: ("min_p", 0.1),
    }
    processors = [one for one in calls[0][1]["logits_processor"] if type(one) in known]
    assert [type(one) for one in processors] == [*known]
    for one in processors:
        name, value = known[type(one)]
        assert (
            getattr(one, name) == value and one.filter_value == -torch.inf if name != "temperature" else True
        )


def test_a_token_is_drawn_from_a_softmax_of_float32(model, monkeypatch):
    seen = []
    own = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, **kw: seen.append((p, kw)) or own(p, **kw))
    model.generate(IDS, do_sample=True, top_k=0, **HOW)
    assert len(seen) == 3
    for probabilities, options in seen:
        assert probabilities.dtype == torch.float32 and options == {"num_samples": 1}
        assert torch.allclose(probabilities.sum(-1), torch.ones(1))


def test_the_likeliest_token_is_an_argmax(model, monkeypatch):
    seen = []
    own = torch.argmax
    monkeypatch.setattr(torch, "argmax", lambda x, **kw: seen.append(kw) or own(x, **kw))
    model.generate(IDS, do_sample=False, **HOW)
    assert seen.count({"dim": -1}) >= 3


def test_drafts_come_from_one_generator(model, monkeypatch):
    calls = noted(monkeypatch, "_get_candidate_generator")
    model.generate(IDS, do_sample=False, prompt_lookup_num_tokens=2, **HOW)
    ((args, kwargs),) = calls
    assert not args and kwargs.keys() >= {"generation_config", "logits_processor"}
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator
    assert {"get_candidates", "update_candidate_strategy"} <= {*dir(generator)}
    assert [*inspect.signature(generator.update_candidate_strategy).parameters][1:] == [
        "input_ids",
        "scores",
        "num_matches",
    ]
