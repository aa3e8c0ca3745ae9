"""Captured tokens with an adapter on, off, switched and trained: PEFT's on the dense model, in one call."""

import copy
from contextlib import ExitStack

import peft
import pytest
import torch
from support import launches, tiny_models
from support.models import eager, generate, prompt
from support.sweep import in_sweep
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.capture.classes import captures_of

OF_LAYERS = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
TARGETS = {
    "qwen3_moe": OF_LAYERS,
    "llama4": OF_LAYERS,
    "llama": {"target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.slow("captures a model with each of its adapters")
@pytest.mark.on("cpu")
@pytest.mark.parametrize("architecture", in_sweep(TARGETS, ("qwen3_moe",)))
def test_switched(architecture, device, monkeypatch):
    monkeypatch.setenv(_environment.CAPTURE, "1")
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
    monkeypatch.setenv(_environment.CAPTURE, "1")
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


@pytest.mark.sweep
def test_switched_between_batches(device, monkeypatch):
    """Eight rows of different lengths side by side, as serve has them: the answers of the dense model."""
    monkeypatch.setenv(_environment.CAPTURE, "1")
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model("qwen3_moe"))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4)
    dense = tiny_models.dense_twin(dense, packed)
    prompts = [torch.arange(1, 3 + row) * 3 % 90 for row in range(8)]
    how, models = GenerationConfig(max_new_tokens=4, do_sample=False), []
    for model in (packed.to(device), dense):
        torch.manual_seed(0)
        config = {"init_lora_weights": False, "task_type": "CAUSAL_LM", **TARGETS["qwen3_moe"]}
        models.append(peft.get_peft_model(model, peft.LoraConfig(r=4, **config)).eval())
        models[-1].add_adapter("second", peft.LoraConfig(r=2, **config))
    ours, own = models
    answers = []
    for name in ("default", "second", "default", None):
        with ExitStack() as stack:
            for model in models:
                if name is None:
                    stack.enter_context(model.disable_adapter())
                else:
                    model.set_adapter(name)
            rows = [ids.to(device) for ids in prompts]
            found = torch_moe_mps.generate_batch(ours.get_base_model(), rows, how, progress=False)
            right = [own.generate(input_ids=ids[None], generation_config=how)[0] for ids in prompts]
        new = [each[-4:].tolist() for each in found]
        assert new == [each[-4:].tolist() for each in right]
        answers.append(new)
    assert answers[0] == answers[2] and answers[0] != answers[1] and answers[3] not in answers[:3]
