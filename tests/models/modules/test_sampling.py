"""generate() draws the tokens that transformers' own code would, in fewer launches."""

import contextlib
import functools

import pytest
import torch
from support import tiny_models
from support.launches import launches
from support.waits import Waits
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import torch_moe_mps
from torch_moe_mps.models.capture import classes, generate
from torch_moe_mps.models.modules import lazy_scores, sampling

IDS = torch.tensor([[3, 5, 7, 9, 4], [8, 2, 6, 1, 5]])
SAMPLES = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 4, "eos_token_id": 999}
SETTINGS = [
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.9, "repetition_penalty": 1.2},  # transformers' own, in front
    {"do_sample": False, "repetition_penalty": 1.5},
    {"return_dict_in_generate": True, "output_scores": True, "top_p": 0.7},
]
MORE = [
    {"top_k": 0},
    {"typical_p": 0.6, "temperature": 0.5},  # transformers' own, behind
    {"num_return_sequences": 2},
    {"num_beams": 2},
]


@contextlib.contextmanager
def own_code():
    """transformers' loop, processors and torch.multinomial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "sampling", lambda processors, *_: contextlib.nullcontext(processors))
        yield


@pytest.fixture
def model(simulated):
    model = tiny_models.tiny_model("qwen3_moe", num_hidden_layers=1).to("mps", torch.bfloat16)
    torch_moe_mps.accelerate(model)
    return model


def generated(model, ids=IDS, seed=0, **how):
    torch.manual_seed(seed)
    mask = torch.ones_like(ids).to("mps")
    return model.generate(ids.to("mps"), attention_mask=mask, **SAMPLES | how)


@pytest.mark.parametrize("settings", [SETTINGS, pytest.param(MORE, marks=pytest.mark.sweep)])
def test_tokens_are_those_of_transformers(model, settings):
    for seed, how in enumerate(settings):
        with own_code():
            expected = generated(model, seed=seed, **how)
        mine = generated(model, seed=seed, **how)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(mine, expected), how
        else:
            assert torch.equal(mine.sequences, expected.sequences)
            assert all(map(torch.equal, mine.scores, expected.scores))


def test_captured_tokens(model):
    how = {**SETTINGS[0], "max_new_tokens": 6}
    with own_code():
        expected = generated(model, **how)
    torch_moe_mps.accelerate(model, capture=True)
    assert torch.equal(generated(model, **how), expected)
    assert classes.captures_of(model).programs


def test_launches(model, simulated):
    """Of a token, before and now. torch.multinomial is one here; on mps it launches 13, and waits twice."""

    def count(**given):
        totals, waits = [], []
        for n in (2, 3):
            with Waits() as waited:
                run = functools.partial(generated, model, **given, max_new_tokens=n)
                totals.append(launches(simulated, run))
            waits.append(waited.count)
        assert waits[0] == waits[1]
        return (totals[1] - totals[0]).total(), totals[1] - totals[0]

    how, greedy = SETTINGS[0], {"do_sample": False}
    with own_code():
        before = count(**how)[0], count(**greedy)[0]
    (samples, names), (chooses, _) = count(**how), count(**greedy)
    assert before in ((71, 51), (70, 51))  # torch 2.15 sorts in one launch less
    assert (samples, chooses) == (51, 50)  # one is the copy of transformers' stop check to the host
    assert names["exponential_"] == names["sample_rows_bf16"] == 1 and not names["multinomial"]


class Cools(LogitsProcessor):
    """Changes the warper behind it with each token."""

    def __init__(self, warper, name, values):
        self.warper, self.name, self.values = warper, name, iter(values)

    def __call__(self, input_ids, scores):
        setattr(self.warper, self.name, next(self.values))
        return scores


def test_processors_that_change_from_token_to_token(model):
    """Their values count as they are when a token is drawn."""

    def cooling(warper, name, values):
        processors = LogitsProcessorList([Cools(warper, name, values), warper])
        return {"top_k": 0, "max_new_tokens": 2, "logits_processor": processors}

    for make in (
        lambda: cooling(TemperatureLogitsWarper(1.0), "temperature", (30.0, 0.01)),
        lambda: cooling(TopKLogitsWarper(2), "filter_value", (-torch.inf, -1.0)),
    ):
        with own_code():
            expected = generated(model, **make())
        assert torch.equal(generated(model, **make()), expected)


@pytest.mark.parametrize("do_sample", [True, False])
def test_ends_in_a_tensor(model, do_sample):
    """As a list of them."""
    options = {"do_sample": do_sample, "max_new_tokens": 3}
    tokens = generated(model, IDS[:1], **options)[0, IDS.shape[1] :].tolist()
    for device in ("cpu", "mps"):
        for ends in ([tokens[1], 96], [], tokens[1]):
            ending = generated(model, IDS[:1], **options, eos_token_id=torch.tensor(ends, device=device))
            assert ending[0, IDS.shape[1] :].tolist() == (tokens[:2] if ends else tokens)


class Broken(LogitsProcessor):
    """NaN from the third token on."""

    def __call__(self, input_ids, scores):
        return scores * torch.nan if input_ids.shape[1] >= IDS.shape[1] + 2 else scores


class Shown(list):
    put = list.append

    def end(self):
        pass


@pytest.mark.parametrize("largest", [sampling.MAX_VOCABULARY, 8])  # with the operator, and without it
def test_logits_without_a_distribution_are_an_error(model, largest, monkeypatch):
    """As torch.multinomial's, once the answer has ended there."""
    monkeypatch.setattr(sampling, "MAX_VOCABULARY", largest)
    how = {"logits_processor": LogitsProcessorList([Broken()]), "ids": IDS[:1], "eos_token_id": 11}
    with own_code(), pytest.raises(RuntimeError, match="probability tensor contains"):
        generated(model, **how)
    shown = Shown()
    with pytest.raises(RuntimeError, match="moe_mps::sample: logits must be finite or -inf"):
        generated(model, **how, streamer=shown)
    assert [each.tolist() for each in shown[3:]] == [[11]] and lazy_scores.current() is None


def test_other_uses_of_the_logits(model):
    """What reads logits, scores or probabilities gets them."""

    class Reads(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert type(scores) is torch.Tensor and scores.dtype == torch.float32
            seen.append(scores.cpu())
            return scores

    seen, results = [], []
    for code in (own_code, contextlib.nullcontext):
        with code():
            results.append(generated(model, logits_processor=LogitsProcessorList([Reads()])))
    assert torch.equal(*results) and all(map(torch.equal, seen[:4], seen[4:]))
