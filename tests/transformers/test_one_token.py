"""A token after a prompt: norms within the operators behind them, keys and values written into the cache."""

import pytest
import torch
from support import tiny_models
from support.launches import operators_of_token
from support.models import assert_close, eager, in_parts, operators_of, output, prompt
from torch import nn
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.transformers.capture.calls import SWITCH

# At which all linear layers of Qwen3-Next and DeepSeek-V3 can be quantised.
SIZES = {**{"shared_expert_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32}}
# Some operators of a captured token: none has another one of rope, rms_norm or router_logits.
SEVERAL = {"rms_norm", "fused_residual_norm", "rope", "rope_cache_", "rope_attention_", "router_logits"}
OPERATORS = {
    "mixtral": {"rope_cache_": 2, "router_logits": 2},
    "gpt_oss": {"rope_attention_": 2, "router_logits": 2},
    "glm4_moe": {"rope_cache_": 2, "router_logits": 1},  # its first layer is dense
    "gemma4": {"rms_norm": 2, "rope_cache_": 2, "router_logits": 2},  # a norm behind the MLP of each layer
    "qwen3_next": {"rope_cache_": 1, "router_logits": 2},  # with the gates of shared experts
    "deepseek_v3": {"rope_cache_": 2, "router_logits": 1},
    "deepseek_v2": {"rope_cache_": 2, "router_logits": 1},
}
# All that the model launches for it, each operator of this package counted once. The attention of latents
# is five operators here, one on MPS; gpt-oss has sinks, for which attention is ours here, too.
LAUNCHES = {
    "mixtral": 17,
    "gpt_oss": 15,
    "glm4_moe": 16,
    "gemma4": 30,
    "qwen3_next": 18,
    "deepseek_v3": 32,
    "deepseek_v2": 34,
}


def models(architecture: str) -> tuple[nn.Module, nn.Module]:
    """A model in 4 bit, and its own code with the same weights."""
    with tiny_models.groups_of_32(), tiny_models.sizes(**SIZES):
        model, dense = (eager(tiny_models.tiny_model(architecture)) for _ in range(2))
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model, tiny_models.dense_twin(dense, model)


def decoded(model: nn.Module, batch: int = 1, tokens: int = 3) -> torch.Tensor:
    """The logits of single tokens after a prompt."""
    _, *each = in_parts(model, prompt(batch, 5 + tokens), *[1] * tokens)[0]
    return torch.cat(each, 1)


@pytest.mark.parametrize("architecture", OPERATORS)
def test_tokens_after_a_prompt(architecture, monkeypatch):
    """Of one sequence and of two, whose norms stay operators of their own; the last tokens are captured."""
    monkeypatch.setenv(SWITCH, "1")
    model, own = models(architecture)
    for batch in (2, 1):
        assert_close(decoded(model, batch, 4), decoded(own, batch, 4), 2e-5)
        counts = operators_of_token(model)
        assert (counts["rms_norm"] + counts["fused_residual_norm"] > 2) == (batch == 2)
    assert {name: n for name, n in counts.items() if name in SEVERAL} == OPERATORS[architecture]
    assert sum(counts.values()) == LAUNCHES[architecture], counts


def test_a_block_in_training_runs_its_own_code():
    model, own = models("qwen3_moe")
    for each in (model, own):
        each.model.layers[0].self_attn.train()
    expected = decoded(own)
    assert_close(decoded(model), expected, 2e-5)
    cache = DynamicCache(config=model.config)
    counts = operators_of(lambda: output(model, prompt(1, 5), past_key_values=cache, use_cache=True))
    assert counts["rope"] == 1


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3"])
def test_the_cache_holds_what_transformers_would_hold(architecture):
    """Beyond a window, after a crop, and with another order of sequences."""
    model, own = models(architecture)
    caches = [DynamicCache(config=each.config) for each in (model, own)]
    for each, cache in zip((model, own), caches, strict=True):
        ids = prompt(2, 12)
        in_parts(each, ids[:, :8], *[1] * 4, cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        if architecture in ("qwen3_moe", "deepseek_v3"):
            cache.crop(-2)
        in_parts(each, ids[:, 8:], *[1] * 3, cache=cache)
    for ours, expected in zip(caches[0].layers, caches[1].layers, strict=True):
        assert_close(ours.keys, expected.keys, 2e-5)
        assert_close(ours.values, expected.values, 2e-5)
