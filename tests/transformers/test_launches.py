"""How many kernels a token launches, layer by layer: what binds decode on a Mac after the bytes."""

from collections import Counter

import pytest
import torch
from support import tiny_models
from support.launches import launches

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


def model_on_mps(architecture: str):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model(architecture, torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model


def one_token(simulated, model) -> Counter[str]:
    with torch.no_grad():
        cache = model(torch.tensor([[1, 2, 3, 4]], device="mps"), use_cache=True).past_key_values
    token = torch.tensor([[5]], device="mps")
    return launches(simulated, lambda: model(token, past_key_values=cache, use_cache=True))


def launches_of_last_layer(simulated, model) -> tuple[Counter[str], int]:
    """Those of the last layer, and how many there are in all."""
    every = one_token(simulated, model)
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:-1]
    return every - one_token(simulated, model), sum(every.values())


@pytest.mark.parametrize("architecture", MOST)
def test_launches_of_a_layer(simulated, architecture):
    model = model_on_mps(architecture)
    layer, _ = launches_of_last_layer(simulated, model)
    assert sum(layer.values()) <= MOST[architecture][0], dict(layer)
