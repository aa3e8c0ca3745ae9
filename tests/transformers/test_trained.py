"""Trained weights: SmolLM2 from its GGUF file, and a Mixture of Experts that has its function."""

import pytest
import torch
from support import trained, trained_models
from support.models import eager

import torch_moe_mps

TOKENS = 12


@pytest.fixture(scope="module")
def parts():
    """(transformers' own model with the file's values, its tokenizer, ids of a question, what it answers)"""
    file = trained.smollm2()
    if file is None:
        pytest.skip(trained.MISSING)
    model, tokenizer = trained_models.dense(file), trained_models.tokenizer_of(file)
    ids = trained_models.asked(tokenizer)
    return model, tokenizer, ids, generated(model, ids)


def generated(model, ids: torch.Tensor, **options) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | options
    return model.generate(input_ids=ids, max_new_tokens=TOKENS, **options)[0, ids.shape[1] :].cpu()


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids.to(model.device)).logits.float().cpu()


def differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def divergence(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean Kullback-Leibler divergence of the next token, in nats."""
    found, expected = found.log_softmax(-1), expected.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


def test_the_file_is_whole(smollm2):
    assert smollm2.stat().st_size == 98_362_432 and smollm2.open("rb").read(4) == b"GGUF"


def test_without_the_package_there_is_no_file(monkeypatch):
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    assert trained.smollm2.__wrapped__() is None


def test_packed_weights_give_the_tokens_of_dequantised_ones(parts, smollm2):
    own, tokenizer, ids, expected = parts
    model = torch_moe_mps.from_pretrained(str(smollm2), dtype=torch.float32, device_map="cpu")
    assert differ(logits(model, ids), logits(own, ids)) <= 1e-5
    assert torch.equal(generated(model, ids), expected)
    assert "capital of France is Paris" in tokenizer.decode(expected)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("layers", [2, pytest.param(30, marks=pytest.mark.sweep)])
def test_a_mixture_of_experts_has_the_function(parts, layers, bits):
    """The router, experts and combine kernels carry trained activations."""
    own, tokenizer, ids, _ = parts
    own = trained_models.first_layers(own, layers)
    model = eager(trained_models.mixture(own))
    before = logits(own, ids)
    assert differ(logits(model, ids), before) <= 1e-5  # in transformers' own code
    report = str(torch_moe_mps.accelerate(model, bits=bits))
    assert "moe_experts" in report and "moe_router (softmax)" in report
    found = logits(model, ids)
    if bits is None:
        assert differ(found, before) <= 1e-5 and torch.equal(generated(model, ids), generated(own, ids))
    else:
        assert divergence(found, before) <= {8: 0.01, 4: 1.0}[bits]
    if layers == 30:
        assert "Paris" in tokenizer.decode(generated(model, ids))
