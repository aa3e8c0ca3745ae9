"""Captured tokens with an adapter on, off, switched and trained: PEFT's on the dense model, in one call."""

import copy

import peft
import pytest
import torch
from support import launches, tiny_models
from support.models import eager, generate, prompt

import torch_moe_mps
from torch_moe_mps.transformers.capture import calls
from torch_moe_mps.transformers.capture.calls import captures_of

TARGETS = {
    "qwen3_moe": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "llama": {"target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.slow("captures a model with each of its adapters")
@pytest.mark.parametrize("architecture", TARGETS)
def test_switched(architecture, device, monkeypatch):
    monkeypatch.setenv(calls.SWITCH, "1")
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4)
    dense = tiny_models.dense_twin(dense, packed)
    packed, written = packed.to(device), []
    for model in (packed, dense):
        torch.manual_seed(0)
        config = {"init_lora_weights": False, "task_type": "CAUSAL_LM", **TARGETS[architecture]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **config)).eval()
        adapted.add_adapter("second", peft.LoraConfig(r=2, **config))
        ids, answers = prompt()[:1].to(model.device), []

        def answer(adapted=adapted, ids=ids, answers=answers, is_ours=model is packed) -> None:
            answers.append(generate(adapted, ids, max_new_tokens=6).cpu())
            if is_ours:
                assert captures_of(adapted).reason is None  # the last token was one call

        for name in ("default", "second", "default"):
            adapted.set_adapter(name)
            answer()
        with adapted.disable_adapter():
            answer()
        answer()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B.default" in name:
                    parameter.mul_(-1)  # in place, as an optimizer changes it
        answer()
        written.append(answers)
    ours, right = written
    assert len({tuple(tokens.flatten().tolist()) for tokens in right}) >= 4
    for mine, expected in zip(ours, right, strict=True):
        assert torch.equal(mine, expected)


def test_operators_of_a_token(simulated, monkeypatch):
    """One for the adapter of each matrix, and experts in steps: no copy, no conversion."""
    monkeypatch.setenv(calls.SWITCH, "1")
    model = launches.model_on_mps("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    generate(model, prompt()[:1].to("mps"), max_new_tokens=6)
    alone = launches.operators_of_token(model)
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **TARGETS["qwen3_moe"])
    adapted = peft.get_peft_model(model, config).eval()
    generate(adapted, prompt()[:1].to("mps"), max_new_tokens=6)
    found = launches.operators_of_token(adapted)
    layers = model.config.num_hidden_layers
    assert found["linear_lora"] == 2 * layers and found["expert_lora"] == 2 * layers
    assert sum(found.values()) <= sum(alone.values()) + 11 * layers, (found, alone)
