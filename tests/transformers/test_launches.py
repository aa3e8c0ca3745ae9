"""How many kernels a token launches, layer by layer: what binds decode on a Mac after the bytes."""

import pytest
from support import tiny_models
from support.launches import launches_by_type, launches_without_layers, model_on_mps

import torch_moe_mps

# Launches of each type of layer, and of everything outside of layers, for one token of a bfloat16 model in
# 4 bit.
MOST = {
    "mixtral": ({"": 8}, 12),
    "qwen3_moe": ({"": 8}, 12),
    "gpt_oss": ({"sliding": 8, "full": 8}, 12),
    "glm4_moe": ({"dense": 6, "sparse": 10}, 12),
    "deepseek_v3": ({"dense": 9, "sparse": 13}, 12),
    "gemma4": ({"sliding": 15, "full": 15}, 12),
    "qwen3_next": ({"linear": 11, "full": 14}, 12),
    "cohere2_moe": ({"dense": 8, "sparse": 15}, 12),
}
# Sparse attention whose indexers may choose all keys.
INDEXED = {
    "deepseek_v32": {"dense": 13, "sparse": 17},
    "glm_moe_dsa": {"dense": 14, "sparse": 18},
    "dots3_note": {"dense": 22, "sparse": 26},
    "mistral_large4": {"dense": 22, "sparse": 26},
    "axk2": {"dense": 26, "sparse": 49},
    "hy_v4": {"dense": 20, "sparse": 24},
    "deepseek_v4": {"heavily compressed, hash moe": 28, "compressed sparse, moe": 22},
    "glm5_next": {"linear, dense": 19, "indexed, sparse": 25},
    "qwen4_exp": {"linear": 57, "indexed": 97},
    "minimax_m3_vl": {"full, dense": 6, "minimax m3 sparse, sparse": 16},
}
WIDER = {"deepseek_v4": {"head_dim": 64}}  # so that what makes compressed keys is quantised
OFTEN = ("glm_moe_dsa", "deepseek_v4")
# Launches of each type of layer where the model's own code runs.
OWN_CODE = {
    "mixtral": {"": 58},
    "qwen3_moe": {"": 72},
    "gpt_oss": {"sliding": 76, "full": 76},
    "glm4_moe": {"dense": 42, "sparse": 80},
    "deepseek_v3": {"dense": 64, "sparse": 102},
    "gemma4": {"sliding": 148, "full": 148},
    "qwen3_next": {"linear": 119, "full": 96},
}


def check_types(simulated, model, most) -> dict:
    found = launches_by_type(simulated, model)
    assert found.keys() == most.keys()
    for kind, layer in found.items():
        assert sum(layer.values()) <= most[kind], (kind, dict(layer))
    return found


@pytest.mark.parametrize("architecture", MOST)
def test_launches_of_a_layer(simulated, architecture):
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    of_layers, of_others = MOST[architecture]
    check_types(simulated, model, of_layers)
    outside = launches_without_layers(simulated, model)
    assert outside["embedding_rows_affine4_32_bf16"] == 1
    assert sum(outside.values()) <= of_others, dict(outside)


@pytest.mark.parametrize(
    "architecture",
    [*OFTEN, *(pytest.param(n, marks=pytest.mark.sweep) for n in INDEXED if n not in OFTEN)],
)
def test_launches_of_a_layer_with_an_indexer(simulated, architecture):
    with tiny_models.sizes(**WIDER.get(architecture, {})):
        model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    check_types(simulated, model, INDEXED[architecture])


# Latent attention without indexers.
LATENT = {
    "kimi_linear": {"linear, dense": 13, "full, sparse": 14},
    "deepseek_v2": {"dense": 10, "sparse": 13},
    "glm4_moe_lite": {"dense": 9, "sparse": 13},
    "axk1": {"dense": 9, "sparse": 15},
}


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", LATENT)
def test_launches_of_a_layer_with_latent_attention(simulated, architecture):
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    check_types(simulated, model, LATENT[architecture])


# Layers of linear attention, by what makes the last layer one: the most launches of one token.
LINEAR = {
    "kimi_linear": ({"layer_types": ["full_attention", "linear_attention"]}, 12),
    "bailing_hybrid": ({"layer_types": ["full_attention", "linear_attention"]}, 10),
    "nemotron_h": ({"layers_block_type": ["attention", "mamba"]}, 5),
    "granitemoehybrid": ({"layer_types": ["full_attention", "linear_attention"]}, 16),
    "minimax": ({"layer_types": ["full_attention", "linear_attention"]}, 17),
    "jamba": (
        {"attn_layer_offset": 0, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
        13,
    ),
}


@pytest.mark.parametrize("architecture", LINEAR)
def test_launches_of_whole_layers_of_linear_attention(simulated, monkeypatch, architecture):
    extra, most = LINEAR[architecture]
    own = tiny_models.EXTRA.get(architecture, {})
    monkeypatch.setitem(tiny_models.EXTRA, architecture, own | extra)
    with tiny_models.sizes(linear_num_heads=16, linear_head_dim=32):
        model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    *_, layer = launches_by_type(simulated, model).values()
    assert sum(layer.values()) <= most, dict(layer)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", OWN_CODE)
def test_launches_of_the_models_own_code(simulated, architecture):
    found = launches_by_type(simulated, model_on_mps(architecture))
    assert {kind: sum(layer.values()) for kind, layer in found.items()} == OWN_CODE[architecture]
