"""A token after a prompt: norms within the operators behind them, keys and values written into the cache."""

import pytest
import torch
from support import tiny_models
from support.launches import operators_of_token
from support.models import assert_close, eager, operators_of, output, prompt
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

import torch_moe_mps
from torch_moe_mps.transformers.basics.report import Done
from torch_moe_mps.transformers.cache import growing_class
from torch_moe_mps.transformers.capture.calls import SWITCH
from torch_moe_mps.transformers.install import rewrite

# At which all linear layers of Qwen3-Next and DeepSeek-V3 can be quantised.
SIZES = {
    **{"shared_expert_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32},
}
# Some operators of a captured token: none has another one of rope, rms_norm or router_logits.
SEVERAL = {"rms_norm", "fused_residual_norm", "rope", "rope_cache_", "router_logits"}
OPERATORS = {
    "mixtral": {"rope_cache_": 2, "router_logits": 2},
    "gpt_oss": {"rope_cache_": 2, "router_logits": 2},
    "glm4_moe": {"rope_cache_": 2, "router_logits": 1},  # its first layer is dense
    "gemma4": {"rms_norm": 2, "rope_cache_": 2},  # a norm behind the MLP of each layer
    "qwen3_next": {"rope_cache_": 1, "router_logits": 2},  # with the gates of shared experts
    "deepseek_v3": {"rope_cache_": 2, "router_logits": 1},
    "deepseek_v2": {"rope_cache_": 2, "router_logits": 1},
}
# All that the model launches for it, each operator of this package counted once. The attention of latents
# is five operators here, one on MPS.
LAUNCHES = {
    "mixtral": 18,
    "gpt_oss": 18,
    "glm4_moe": 17,
    "gemma4": 30,
    "qwen3_next": 21,
    "deepseek_v3": 33,
    "deepseek_v2": 36,
}


def models(architecture: str) -> tuple[nn.Module, nn.Module]:
    """A model in 4 bit, and its own code with the same weights."""
    with tiny_models.groups_of_32(), tiny_models.sizes(**SIZES):
        model, dense = (eager(tiny_models.tiny_model(architecture)) for _ in range(2))
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model, tiny_models.dense_twin(dense, model)


def decoded(model: nn.Module, batch: int = 1, tokens: int = 3) -> torch.Tensor:
    """The logits of single tokens after a prompt."""
    cache, ids = DynamicCache(config=model.config), prompt(batch, 5 + tokens)
    output(model, ids[:, :5], past_key_values=cache, use_cache=True)
    each = [
        output(model, ids[:, i : i + 1], past_key_values=cache, use_cache=True) for i in range(5, 5 + tokens)
    ]
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


@pytest.mark.parametrize(
    "path",
    ["", "input_layernorm", "self_attn", "self_attn.o_proj", "post_attention_layernorm", "mlp", "mlp.gate"],
)
def test_hooks_see_what_the_models_code_would_show_them(path):
    model, own = models("qwen3_moe")
    seen: list[list[torch.Tensor]] = []
    for each in (model, own):
        inputs: list[torch.Tensor] = []
        seen.append(inputs)

        def hook(module, args, kwargs, result, inputs=inputs):
            inputs.append(args[0] if args else kwargs["hidden_states"])

        each.model.layers[1].get_submodule(path).register_forward_hook(hook, with_kwargs=True)
    assert_close(decoded(model), decoded(own), 2e-5)
    assert len(seen[0]) == len(seen[1]) == 4
    for ours, expected in zip(*seen, strict=True):
        assert_close(ours.reshape(expected.shape), expected, 2e-5)


def test_a_norm_that_is_replaced_runs():
    model, own = models("qwen3_moe")
    for each in (model, own):
        each.model.layers[0].post_attention_layernorm = nn.LayerNorm(64).eval()
    assert_close(decoded(model), decoded(own), 2e-5)


@pytest.mark.parametrize("path", ["self_attn", "mlp", "mlp.gate"])
def test_a_block_that_is_compiled_for_itself_is_called(path):
    """nn.Module.compile keeps what calls of the module run from then on."""
    model, own = models("qwen3_moe")
    block = model.model.layers[0].get_submodule(path)
    calls = []

    def compiled(*args, **kwargs):
        calls.append(path)
        return block._call_impl(*args, **kwargs)

    block._compiled_call_impl = compiled
    assert_close(decoded(model), decoded(own), 2e-5)
    assert len(calls) == 4


def test_a_block_in_training_runs_its_own_code():
    model, own = models("qwen3_moe")
    for each in (model, own):
        each.model.layers[0].self_attn.train()
    expected = decoded(own)
    assert_close(decoded(model), expected, 2e-5)
    cache = DynamicCache(config=model.config)
    counts = operators_of(lambda: output(model, prompt(1, 5), past_key_values=cache, use_cache=True))
    assert counts["rope"] == 1


def test_experts_of_another_implementation_get_normed_tokens():
    with tiny_models.groups_of_32():
        model, own = (eager(tiny_models.tiny_model("qwen3_moe")) for _ in range(2))
    torch_moe_mps.accelerate(model)
    model.set_experts_implementation("batched_mm")
    assert_close(decoded(model), decoded(own), 2e-5)


@pytest.mark.parametrize("change", ["", "observed", "another eps", "replaced"])
def test_norms_of_latents(change):
    """The rotary embedding computes them while they are what it can compute."""
    model, own = models("deepseek_v3")
    seen: list[list[torch.Tensor]] = [[], []]
    for each, inputs in zip((model, own), seen, strict=True):
        attention = each.model.layers[1].self_attn
        if change == "observed":
            attention.kv_a_layernorm.register_forward_hook(lambda m, args, out, i=inputs: i.append(args[0]))
        elif change == "another eps":
            attention.kv_a_layernorm.variance_epsilon = 0.1
        elif change == "replaced":
            attention.kv_a_layernorm = nn.LayerNorm(32, bias=False).eval()
    assert_close(decoded(model, 2), decoded(own, 2), 2e-5)
    assert len(seen[0]) == len(seen[1]) == (4 if change == "observed" else 0)
    for ours, expected in zip(*seen, strict=True):
        assert_close(ours.reshape(expected.shape), expected, 2e-5)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3"])
def test_the_cache_holds_what_transformers_would_hold(architecture):
    """Beyond a window, after a crop, and with another order of sequences."""
    model, own = models(architecture)
    caches = [DynamicCache(config=each.config) for each in (model, own)]
    for each, cache in zip((model, own), caches, strict=True):
        ids = prompt(2, 12)
        output(each, ids[:, :4], past_key_values=cache, use_cache=True)
        for i in range(4, 8):
            output(each, ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        if architecture in ("qwen3_moe", "deepseek_v3"):
            cache.crop(-2)
        for i in range(8, 12):
            output(each, ids[:, i : i + 1], past_key_values=cache, use_cache=True)
    for ours, expected in zip(caches[0].layers, caches[1].layers, strict=True):
        assert_close(ours.keys, expected.keys, 2e-5)
        assert_close(ours.values, expected.values, 2e-5)


class Rotated(nn.Module):
    layer_idx = 0

    def forward(self, q, k, v, cos, sin, cache=None, asked=True):
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return q, k, v


class Asked(Rotated):
    def forward(self, q, k, v, cos, sin, cache=None, asked=True):
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        v = v.transpose(1, 2)
        if asked:
            k, v = cache.update(k, v, self.layer_idx)
        return q, k, v


class ReadTwice(Rotated):
    def forward(self, q, k, v, cos, sin, cache=None, asked=True):
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        new, v = k, v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return q, k, v, new


class TakenTwice(Rotated):
    def forward(self, q, k, v, cos, sin, cache=None, asked=True):
        both = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        k, v = both[1], v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        new = both[1]
        return both[0], k, v, new


@pytest.mark.parametrize("cls", [Rotated, Asked, ReadTwice, TakenTwice])
def test_keys_and_values_that_a_cache_takes(cls):
    module, own = cls().eval(), cls().eval()
    rewrites, _ = rewrite(module)
    assert rewrites == [Done("rope")]
    caches = DynamicCache(), DynamicCache()
    caches[0].layers.append(growing_class(DynamicLayer)())
    for tokens, asked in ((5, True), (1, True), (1, False), (2, True)):
        q, k, v = (torch.randn(2, tokens, heads, 8) for heads in (4, 2, 2))
        cos, sin = torch.randn(2, 1, tokens, 8)
        with torch.no_grad():
            ours, expected = (
                m(q, k, v, cos, sin, c, asked) for m, c in zip((module, own), caches, strict=True)
            )
        for a, b in zip(ours, expected, strict=True):
            assert_close(a, b, 2e-5)
    with torch.no_grad():
        for a, b in zip(*(m(q, k, v, cos, sin, None, False) for m in (module, own)), strict=True):
            assert_close(a, b, 2e-5)
