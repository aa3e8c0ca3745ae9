"""Layers whose states may lag behind: those that go on by the tokens that held."""

import pytest
import torch
from support import tiny_models
from support.models import eager

import torch_moe_mps
from torch_moe_mps.transformers.caches import lagging as layers
from torch_moe_mps.transformers.lagging import lagging_layers

DELTA_RULE = ("qwen3_next", "qwen3_5_moe", "olmo_hybrid")


def model_of(architecture: str):
    model = eager(tiny_models.tiny_model(architecture))
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.parametrize("architecture", DELTA_RULE)
def test_layers_of_the_delta_rule_may(architecture):
    model = model_of(architecture)
    kinds = model.config.get_text_config().layer_types
    expected = {number for number, kind in enumerate(kinds) if kind == "linear_attention"}
    assert expected and lagging_layers(model) == expected


@pytest.mark.parametrize("architecture", ["qwen3_moe", "lfm2_moe"])
def test_others_may_not(architecture):
    assert lagging_layers(model_of(architecture)) == set()


def test_a_models_own_code_may_not():
    """Nor graphs, which do not see what is pending."""
    model = eager(tiny_models.tiny_model("qwen3_next"))
    assert lagging_layers(model) == set()
    torch_moe_mps.accelerate(model)
    assert lagging_layers(torch.compile(model)) == set()
    model.model.forward = torch.compile(model.model.forward)
    assert lagging_layers(model) == set()
    del model.model.forward
    assert lagging_layers(model) == {0}


def test_tensors_of_another_device_by_default_change_nothing():
    model = model_of("qwen3_next")
    model.model.layers[0].linear_attn.norm.variance_epsilon = 1e-5  # a verdict of its own
    with torch.device("meta"):
        assert lagging_layers(model) == {0}


def test_a_layer_that_forgets_what_held_may_not(monkeypatch):
    """It is tried, whatever its class says."""
    model = model_of("qwen3_next")
    linear = model.model.layers[0].linear_attn
    linear.norm.variance_epsilon = 1e-7  # a verdict of its own
    monkeypatch.setattr(layers.Lagging, "set_counts", lambda layer, counts: None)
    assert lagging_layers(model) == set()
