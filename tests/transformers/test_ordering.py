"""Qwen3-Next, whose projections give q, k, v and the gates head by head."""

import copy

import pytest
import torch
from support import tiny_models
from support.linear_attention import decoded, layer_of, model_of
from support.models import assert_close, eager, output, prompt

import torch_moe_mps


def test_formats_that_differ():
    """The layers are not joined; the logits match the rounded weights."""
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model("qwen3_next"))
    model = copy.deepcopy(dense)
    torch_moe_mps.accelerate(model, bits=4, group_size=32, overrides={"*in_proj_ba": {"bits": 8}})
    assert layer_of(model).in_proj_ba.format.bits == 8
    twin = tiny_models.dense_twin(dense, model)
    for result, expected in zip(decoded(model)[0], decoded(twin)[0], strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    saved = {name: value for name, value in model.state_dict().items() if "in_proj" in name}
    assert all("order" not in name for name in saved)


def test_adapters_on_the_projections():
    """Put in after acceleration: seen in evaluation, trained by the model's own code."""
    peft = pytest.importorskip("peft")
    model = model_of()
    targets = ["in_proj_qkvz", "in_proj_ba"]
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets)

    def adapted(base):
        torch.manual_seed(0)
        return peft.get_peft_model(base, config).eval()

    expected = output(adapted(copy.deepcopy(model)), prompt())
    torch_moe_mps.accelerate(model)
    model = adapted(model)
    assert_close(output(model, prompt()), expected, 1e-5)
    model.train()(input_ids=prompt(), labels=prompt()).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
