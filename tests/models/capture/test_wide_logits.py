"""`generate` and the commands read a 16-bit model's logits in float32, as the output head has summed them.

Where anything else may read them, they have the model's dtype.
"""

import numpy as np
import pytest
import torch
from support import tiny_models
from support.models import assert_close, generate, prompt
from support.oracles_experts import dequantise
from transformers import GenerationConfig, LogitsProcessor

import torch_moe_mps
from torch_moe_mps.commands import perplexity
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument


def model_on(device: str, capture: bool = False):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("llama").to(torch.bfloat16).to(device)
    torch_moe_mps.accelerate(model, bits=4, group_size=32, capture=capture, check=False)
    return model


def stored_weight(layer) -> list[np.ndarray]:
    packed, scales, biases = (each.detach().cpu() for each in layer.weights()[:3])
    return [packed.view(torch.uint32), scales, biases]


class States:
    """The states that an output head gets, and its product with them in float64."""

    def __init__(self, model):
        head = model.get_output_embeddings()
        self.matrix = torch.from_numpy(dequantise(*stored_weight(head), head.format.name)).double()
        self.last: list[torch.Tensor] = []
        head.register_forward_pre_hook(lambda _, given: self.last.append(given[0].cpu().double()))

    def logits(self) -> torch.Tensor:
        return torch.cat([states[:, -1] for states in self.last]) @ self.matrix.T


def assert_unrounded(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    logits = logits.cpu()
    error = (logits.double() - expected).abs().max() / expected.abs().max()
    assert error < 5e-5, error
    rounded = (logits.bfloat16().float() - logits).abs().max() / expected.abs().max()
    assert rounded > 1e-4  # so that the line above tells


@pytest.mark.on("cpu")
def test_generate(device):
    model = model_on(device)
    states = States(model)
    shown = {"return_dict_in_generate": True, "output_logits": True}
    out = generate(model, prompt(1, 5).to(model.device), max_new_tokens=3, **shown)
    assert_unrounded(torch.cat(out.logits), states.logits())
    with torch.no_grad():  # whoever calls it himself may count on its dtype
        assert model(prompt(1, 5).to(model.device)).logits.dtype == torch.bfloat16


@pytest.mark.on("cpu")
def test_captured_tokens(device):
    """A token of `generate` is not that of a plain call, whichever was captured first."""
    model = model_on(device, capture=True)
    ids = prompt(1, 5).to(model.device)
    shown = {"return_dict_in_generate": True, "output_logits": True}
    expected = torch.cat(generate(model_on(device), ids, **shown).logits)
    with torch.no_grad():
        for _ in range(2):
            logits = torch.cat(generate(model, ids, **shown).logits)
            assert_close(logits, expected, 0.02)
            assert (logits.bfloat16().float() != logits).any(-1).all()
            out = model(ids, use_cache=True)
            for _ in range(4):
                out = model(ids[:, :1], **cache_argument(model, cache_among(out)))
                assert out.logits.dtype == torch.bfloat16
    assert len(captures_of(model).programs) == 2


def test_code_of_a_user_that_generates():
    """It calls the model itself, and may do anything with logits."""
    seen = []

    def own(model, ids, **_):
        seen.append(model(ids).logits.dtype)
        return ids

    generate(model_on("cpu"), prompt(1, 5), custom_generate=own)
    assert seen == [torch.bfloat16]


def test_a_batch(device):
    """Rows of answers that are generated together."""

    class Note(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(scores.clone())
            return scores

    model = model_on(device)
    states, notes = States(model), [Note(), Note()]
    config = GenerationConfig(max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    prompts = [prompt(1, 5)[0], prompt(1, 7)[0]]
    torch_moe_mps.generate_batch(
        model, prompts, generation_config=config, logits_processor=[[note] for note in notes]
    )
    seen = torch.cat([torch.cat(note.seen) for note in notes])
    made = states.logits()
    order = [int((made - each.cpu().double()).abs().amax(1).argmin()) for each in seen]
    assert sorted(order) == [*range(6)]
    assert_unrounded(seen, made[order])


def test_perplexity():
    model = model_on("cpu")
    states, ids = States(model), prompt(1, 6)[0]
    with torch.no_grad():
        found = perplexity._log_probabilities(model, ids)
    expected = (states.last[0][0, :-1] @ states.matrix.T).log_softmax(-1)
    assert (found.double() - expected).abs().max() < 1e-4


def test_a_dense_head_and_models_without_one():
    """A dense head is torch's product, which rounds; an encoder has none."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("llama").bfloat16()
    torch_moe_mps.accelerate(model, check=False)
    generate(model, prompt(1, 5), max_new_tokens=2)
    torch_moe_mps.accelerate(model.model, bits=4, group_size=32, check=False)
    with torch.no_grad():
        assert model.model(prompt(1, 5)).last_hidden_state.dtype == torch.bfloat16
