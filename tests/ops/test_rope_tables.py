"""The tables of rotary position embeddings."""

import pytest
import torch
from support.oracles import exact, spacing
from support.oracles_operators import checked
from support.values import DTYPES

from torch_moe_mps.ops.rope import rope_tables


def frequencies(pairs):
    return 10000.0 ** -(torch.arange(pairs) / pairs)


def check(*arguments):
    dtype = arguments[3]
    assert all(table.dtype == dtype for table in checked("rope_tables", *arguments))


def test_positions(device):
    """From 0 to positions that float32 cannot represent, and negative ones."""
    ids = torch.tensor([[0, 1, 2, 4095, 131071, 999999, 10**6, 2**24 + 1, 2**31 - 1, -1, -77]]).to(device)
    check(ids, frequencies(32).to(device), 1.0, torch.float32, "pairs")


def modules():
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3
    from transformers.models.glm4_moe import configuration_glm4_moe, modeling_glm4_moe
    from transformers.models.gpt_oss import configuration_gpt_oss, modeling_gpt_oss
    from transformers.models.qwen3_moe import configuration_qwen3_moe, modeling_qwen3_moe

    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e5, "original_max_position_embeddings": 4096}
    yield modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(configuration_qwen3_moe.Qwen3MoeConfig()), "halves"
    config = configuration_qwen3_moe.Qwen3MoeConfig(rope_parameters=yarn, max_position_embeddings=32768)
    yield modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(config), "halves"
    yield modeling_glm4_moe.Glm4MoeRotaryEmbedding(configuration_glm4_moe.Glm4MoeConfig()), "halves"
    yield (
        modeling_deepseek_v3.DeepseekV3RotaryEmbedding(configuration_deepseek_v3.DeepseekV3Config()),
        "halves",
    )
    yield modeling_gpt_oss.GptOssRotaryEmbedding(configuration_gpt_oss.GptOssConfig()), "pairs"


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_modules_of_models(device, dtype):
    ids = torch.tensor([[0, 1, 77, 4096, 131071, 999999]])
    for module, layout in modules():
        model = module(torch.zeros(1, dtype=dtype), ids)
        ours = rope_tables(
            ids.to(device), module.inv_freq.to(device), module.attention_scaling, dtype, layout
        )
        for a, b in zip(ours, model, strict=True):
            allowed = spacing(exact(b), dtype) + 1e-6
            assert a.shape == b.shape and (abs(exact(a) - exact(b)) <= allowed).all()
