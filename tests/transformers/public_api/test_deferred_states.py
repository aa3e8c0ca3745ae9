"""Layers whose states may lag behind: those that go on by the tokens that held."""

import pytest
import torch
from accelerate import init_empty_weights
from support import tiny_models
from support.models import eager
from support.sweep import in_sweep
from transformers import AutoConfig, AutoModelForCausalLM

import torch_moe_mps
from torch_moe_mps.models.caches import deferred_states as layers
from torch_moe_mps.models.caches.deferred_states import Selective, StateKind
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.upstream.models import LinearAttentionLayer
from torch_moe_mps.transformers.deferrable import deferrable_layers

RULE, CHANNELS = StateKind(delta=True), StateKind(delta=True, is_wide=True)
MAMBA, SELECTIVE = StateKind(delta=False, is_transposed=True), Selective
# The layers that may, and how they take tokens in; convolutions alone have no recurrence whose kind counts,
# nor has one with a number for each channel.
LAGGING = {
    "bailing_hybrid": {0: CHANNELS},
    "bamba": {0: MAMBA},
    "glm5_next": {0: CHANNELS},
    "granitemoehybrid": {0: MAMBA},
    "falcon_mamba": {0: SELECTIVE, 1: SELECTIVE},
    "jamba": {0: SELECTIVE},
    "kimi_linear": {0: CHANNELS},
    "lfm2": {0: None},
    "lfm2_moe": {0: None},
    "lfm3": {0: None},
    "mamba": {0: SELECTIVE, 1: SELECTIVE},
    "mamba2": {0: MAMBA, 1: MAMBA},
    "minimax": {1: StateKind(delta=False)},
    "nemotron_h": {0: MAMBA},
    "olmo_hybrid": {0: RULE},
    "qwen3_5_moe": {0: RULE},
    "qwen3_next": {0: RULE},
    "qwen4_exp": {0: RULE},
    "zamba2": {0: MAMBA, 1: MAMBA},  # of which the second beside keys
}

# Those whose classes have the sizes of a published model by default.
PUBLISHED = ("bailing_hybrid", "bamba", "granitemoehybrid", "kimi_linear", "lfm3", "mamba2")
PUBLISHED += ("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2")


def model_of(architecture: str):
    if architecture in tiny_models.other_causal():
        model = eager(tiny_models.other_model(architecture))
    else:
        model = eager(tiny_models.tiny_model(architecture, **tiny_models.WITH_STATES.get(architecture, {})))
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.parametrize(
    "architecture",
    in_sweep(
        LAGGING,
        ("jamba", "lfm2_moe", "qwen3_next", "kimi_linear", "zamba2"),
    ),
)
def test_layers_whose_states_take_tokens_in_may(architecture):
    found, expected = deferrable_layers(model_of(architecture)), LAGGING[architecture]
    assert found.keys() == expected.keys()
    assert all(kind in (None, found[number], type(found[number])) for number, kind in expected.items())


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_so_may_those_of_published_sizes(architecture):
    """The widths of their layers differ; weights are not needed."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture))
    torch_moe_mps.accelerate(model.eval())
    states = [isinstance(layer, LinearAttentionLayer) for layer in new_cache(model).layers]
    assert any(states) and list(deferrable_layers(model)) == [n for n, held in enumerate(states) if held]


def test_a_model_without_states_has_none_that_may():
    assert deferrable_layers(model_of("qwen3_moe")) == {}


def test_a_models_own_code_may_not():
    """Nor graphs, which do not see what is pending."""
    model = eager(tiny_models.tiny_model("qwen3_next"))
    assert deferrable_layers(model) == {}
    torch_moe_mps.accelerate(model)
    assert deferrable_layers(torch.compile(model)) == {}
    model.model.forward = torch.compile(model.model.forward)
    assert deferrable_layers(model) == {}
    del model.model.forward
    assert deferrable_layers(model) == {0: RULE}


def test_tensors_of_another_device_by_default_change_nothing():
    model = model_of("qwen3_next")
    model.model.layers[0].linear_attn.norm.variance_epsilon = 1e-5  # a verdict of its own
    with torch.device("meta"):
        assert deferrable_layers(model) == {0: RULE}


def test_a_layer_that_forgets_what_held_may_not(monkeypatch):
    """It is tried, whatever its class says."""
    model = model_of("qwen3_next")
    linear = model.model.layers[0].linear_attn
    linear.norm.variance_epsilon = 1e-7  # a verdict of its own
    monkeypatch.setattr(layers.DeferredLayer, "set_counts", lambda layer, counts: None)
    assert deferrable_layers(model) == {}
