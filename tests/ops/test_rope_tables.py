"""The tables of rotary position embeddings."""

import pytest
import torch
from support.oracles import exact, spacing
from support.oracles_operators import checked
from support.values import DTYPES

from torch_moe_mps.ops.rope import LAYOUTS, rope_tables


def frequencies(pairs):
    return 10000.0 ** -(torch.arange(pairs) / pairs)


def check(*arguments):
    dtype = arguments[3]
    assert all(table.dtype == dtype for table in checked("rope_tables", *arguments))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables(device, dtype, layout):
    for i, (batch, tokens, pairs) in enumerate([(1, 1, 64), (2, 3, 16), (1, 5, 7), (3, 1, 1)]):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 10**6, (batch, tokens), generator=generator).to(device)
        ids = ids if i % 2 else ids.int()
        check(ids, frequencies(pairs).to(device), 1.0 if i % 2 else 1.34, dtype, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_positions_of_a_token(device, dtype, layout):
    """In time, height and width; a pair whose axis is none of them has no table."""
    for i, (count, batch, tokens, pairs) in enumerate([(3, 1, 1, 32), (3, 2, 5, 7), (1, 3, 2, 4)]):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 10**5, (count, batch, tokens), generator=generator).to(device)
        ids = ids if i % 2 else ids.int()
        axes = torch.randint(0, count, (pairs,), generator=generator, dtype=torch.int32)
        axes[: i and 2] = torch.tensor([-1, count][: i and 2], dtype=torch.int32)
        check(ids, frequencies(pairs).to(device), 1.34, dtype, layout, axes.to(device))
        spread = axes.repeat_interleave(2).to(device)[::2]
        check(ids, frequencies(pairs).to(device), 1.0, dtype, layout, spread)


def test_positions(device):
    """From 0 to positions that float32 cannot represent, and negative ones."""
    ids = torch.tensor([[0, 1, 2, 4095, 131071, 999999, 10**6, 2**24 + 1, 2**31 - 1, -1, -77]]).to(device)
    check(ids, frequencies(32).to(device), 1.0, torch.float32, "pairs")


def test_strides(device):
    ids = torch.arange(24).view(4, 6).t()[1:].to(device)
    check(ids, frequencies(16).to(device)[::2], 1.0, torch.float32, "halves")
    check(ids[:1].expand(3, -1), frequencies(16).to(device)[3:], 1.0, torch.float16, "interleaved")


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
