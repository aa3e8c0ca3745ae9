"""How many kernels a token launches, layer by layer: what binds decode on a Mac after the bytes."""

import pytest
from support import tiny_models
from support.launches import launches_of_last_layer, launches_without_layers, model_on_mps

import torch_moe_mps

# Launches of the last layer, and of everything outside of layers, for one token of a bfloat16 model in 4 bit.
MOST = {
    "mixtral": (8, 12),
    "qwen3_moe": (8, 12),
    "gpt_oss": (8, 12),
    "glm4_moe": (10, 12),
    "deepseek_v3": (13, 12),
    "gemma4": (15, 12),
    "qwen3_next": (14, 12),
}
# Launches of the last layer where the model's own code runs.
OWN_CODE = {
    "mixtral": 58,
    "qwen3_moe": 72,
    "gpt_oss": 76,
    "glm4_moe": 80,
    "deepseek_v3": 102,
    "gemma4": 148,
    "qwen3_next": 96,
}


@pytest.mark.parametrize("architecture", MOST)
def test_launches_of_a_layer(simulated, architecture):
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    layer, _ = launches_of_last_layer(simulated, model)
    of_layer, of_others = MOST[architecture]
    assert sum(layer.values()) <= of_layer, dict(layer)
    outside = launches_without_layers(simulated, model)
    assert outside["embedding_rows_affine4_32_bf16"] == 1
    assert sum(outside.values()) <= of_others, dict(outside)


def test_launches_of_a_layer_with_linear_attention(simulated, monkeypatch):
    """Three of four layers of Qwen3-Next have it; in the model above the last layer has softmax attention."""
    layers = {"layer_types": ["full_attention", "linear_attention"]}
    monkeypatch.setitem(tiny_models.EXTRA, "qwen3_next", layers)
    with tiny_models.sizes(linear_num_value_heads=16):  # all linear layers can be quantised
        own, model = (model_on_mps("qwen3_next") for _ in range(2))
    assert sum(launches_of_last_layer(simulated, own)[0].values()) == 119
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    layer, _ = launches_of_last_layer(simulated, model)
    assert layer["delta_scan64_bf16"] == 1 and "index_select" not in layer
    assert sum(layer.values()) <= 11, dict(layer)


# Layers of linear attention, by what makes the last layer one: the most launches of one token.
LINEAR = {
    "kimi_linear": ({"layer_types": ["full_attention", "linear_attention"]}, 12),
    "bailing_hybrid": ({"layer_types": ["full_attention", "linear_attention"]}, 10),
    "nemotron_h": ({"layers_block_type": ["attention", "mamba"]}, 5),
    "granitemoehybrid": ({"layer_types": ["full_attention", "linear_attention"]}, 18),
    "minimax": ({"layer_types": ["full_attention", "linear_attention"]}, 17),
}


@pytest.mark.parametrize("architecture", LINEAR)
def test_launches_of_whole_layers_of_linear_attention(simulated, monkeypatch, architecture):
    extra, most = LINEAR[architecture]
    own = tiny_models.EXTRA.get(architecture, {})
    monkeypatch.setitem(tiny_models.EXTRA, architecture, own | extra)
    with tiny_models.sizes(linear_num_heads=16, linear_head_dim=32):
        model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    layer, _ = launches_of_last_layer(simulated, model)
    assert sum(layer.values()) <= most, dict(layer)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", OWN_CODE)
def test_launches_of_the_models_own_code(simulated, architecture):
    layer, _ = launches_of_last_layer(simulated, model_on_mps(architecture))
    assert sum(layer.values()) == OWN_CODE[architecture], dict(layer)
