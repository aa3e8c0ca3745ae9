"""Attention with sinks as transformers calls it."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from torch_moe_mps.transformers.attention import attention, attention_mask

pytestmark = pytest.mark.one_schedule
NAME = "moe_mps_sinks_test"


@pytest.fixture
def registered(monkeypatch):
    for interface, function in ((AttentionInterface, attention), (AttentionMaskInterface, attention_mask)):
        mapping = dict(interface._global_mapping)
        monkeypatch.setattr(interface, "_global_mapping", {**mapping, NAME: function})


def config(**changes):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 6,
        "pad_token_id": 0,
    }
    return GptOssConfig(**{**sizes, **changes})


def layer() -> gpt_oss.GptOssAttention:
    module = gpt_oss.GptOssAttention(config(), 0).eval()
    torch.nn.init.normal_(module.sinks)
    return module.requires_grad_(False)


def inputs(device, dtype, tokens, keys):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, 4, tokens, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def additive(tokens, keys, window, dtype):
    distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(1, 1, tokens, keys, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def calls_of(monkeypatch) -> list:
    """The calls of the model's own code from here on."""
    calls, eager = [], gpt_oss.eager_attention_forward
    monkeypatch.setattr(gpt_oss, "eager_attention_forward", lambda *a, **k: calls.append(a) or eager(*a, **k))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_as_the_model(device, dtype, monkeypatch):
    """Up to 8 tokens by the operator, with a mask or without, more by the model's code."""
    module, calls = layer().to(dtype), calls_of(monkeypatch)
    eager = gpt_oss.eager_attention_forward
    for tokens, keys in ((1, 20), (8, 30), (9, 30)):
        q, k, v = inputs("cpu", dtype, tokens, keys)
        mask = additive(tokens, keys, 6, dtype)
        expected, _ = eager(module, q, k, v, mask, scaling=0.3)
        calls.clear()
        on_device = [t.to(device) for t in (q, k, v)]
        moved = layer().to(dtype).to(device)
        moved.sinks.copy_(module.sinks)
        for given in (mask.to(device), (mask == 0).to(device), None):
            out, _ = attention(
                moved, *on_device, given, scaling=0.3, sliding_window=6, s_aux=moved.sinks, position_ids=None
            )
            tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
        assert len(calls) == (3 if tokens > 8 else 0)


def test_the_models_code_where_it_is_needed(monkeypatch):
    """For gradients, dropout, attention's weights and masks of single heads."""
    module, calls = layer(), calls_of(monkeypatch)
    q, k, v = inputs("cpu", torch.float32, 2, 10)
    mask = additive(2, 10, 6, torch.float32)

    def call(query, mask=mask, **options):
        return attention(module, query, k, v, mask, scaling=0.3, s_aux=module.sinks, **options)

    assert call(q)[1] is None and not calls
    out, weights = call(q.clone().requires_grad_())
    out.sum().backward()
    assert weights.shape == (2, 4, 2, 10)
    call(q, dropout=0.1)
    call(q, output_attentions=True)
    call(q, mask.expand(1, 4, -1, -1))
    assert len(calls) == 4
    with torch.no_grad():
        assert call(q.clone().requires_grad_())[1] is None and len(calls) == 4


def test_without_code_of_the_model():
    module = torch.nn.Identity()
    q, k, v = inputs("cpu", torch.float32, 9, 9)
    with pytest.raises(
        RuntimeError, match="attention of Identity must be in a file with eager_attention_forw"
    ):
        attention(module, q, k, v, None, scaling=0.3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(device, registered, cache, padded):
    """The tokens of eager attention, with windows that slide, on every kind of cache."""
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(config(), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(1, 50, (2, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation(NAME)
    model.to(device)
    actual = model.generate(ids.to(device), attention_mask=mask.to(device), **options)
    assert torch.equal(actual.sequences.cpu(), expected.sequences)
    for ours, own in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours.cpu(), own, rtol=1e-4, atol=1e-4)
