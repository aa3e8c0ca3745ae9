"""How many kernels a token launches, layer by layer: what binds decode on a Mac after the bytes."""

import pytest
from support.launches import launches_of_last_layer, model_on_mps

import torch_moe_mps

# Launches of the last layer, and of everything outside of layers, for one token of a bfloat16 model in 4 bit.
MOST = {
    "mixtral": (12, 12),
    "qwen3_moe": (12, 12),
    "gpt_oss": (12, 12),
    "glm4_moe": (14, 12),
    "deepseek_v3": (22, 12),
    "gemma4": (24, 12),
    "qwen3_next": (40, 12),
}


LAYERS_ALIKE = ["mixtral", "qwen3_moe", "gpt_oss", "gemma4"]
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
    layers = len(model.get_decoder().layers)
    layer, every = launches_of_last_layer(simulated, model)
    of_layer, outside = MOST[architecture]
    assert sum(layer.values()) <= of_layer, dict(layer)
    if architecture in LAYERS_ALIKE:
        assert every - layers * sum(layer.values()) <= outside


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", OWN_CODE)
def test_launches_of_the_models_own_code(simulated, architecture):
    layer, _ = launches_of_last_layer(simulated, model_on_mps(architecture))
    assert sum(layer.values()) == OWN_CODE[architecture], dict(layer)
