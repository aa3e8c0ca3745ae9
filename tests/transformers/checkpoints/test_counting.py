"""Counts of parameters of packed models are those of the dense ones."""

import copy

import peft
import pytest
from support import tiny_models
from support.models import eager

import torch_moe_mps


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("recipe", [{"bits": 4, "group_size": 32}, {"mode": "mxfp4"}])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_count_as_what_they_stand_for(architecture, recipe, tied):
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture, tie_word_embeddings=tied))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, **recipe)
    for options in ({}, {"exclude_embeddings": True}):
        assert packed.num_parameters(**options) == dense.num_parameters(**options)
    assert packed.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_peft_says_the_share_of_the_dense_model(architecture, capsys):
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture))
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32)
    experts = {"target_parameters": ["experts.down_proj"]} if architecture == "qwen3_moe" else {}
    config = {"r": 4, "target_modules": ["q_proj"], **experts}
    said = []
    for model in (dense, packed):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        adapted.print_trainable_parameters()
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "trainable params" in said[0]
