"""One token with a static cache, compiled as a whole."""

import pytest
import torch
from support import tiny_models
from transformers import StaticCache

import torch_moe_mps

ALWAYS = ["qwen3_moe", "gpt_oss"]
IN_THE_SWEEP = ["mixtral", "glm4_moe", "deepseek_v3", "gemma4", "qwen3_next"]
ARCHITECTURES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.sweep) for name in IN_THE_SWEEP)]


def after_a_prompt(model) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(torch.arange(4)[None], past_key_values=cache)
    return cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_step_compiles(architecture):
    """Without a graph break, quantised, to the logits of the step that is not compiled."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    token = torch.tensor([[5]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(token, past_key_values=after_a_prompt(model)).logits
        result = compiled(token, past_key_values=after_a_prompt(model)).logits
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
