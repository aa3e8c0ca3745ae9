"""Attention as transformers calls it: with sinks, and in place of torch's for few new tokens."""

import pytest
import torch
from support import tiny_models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

import torch_moe_mps
from torch_moe_mps.transformers.attention import attention, attention_mask, attention_mask_in_windows

pytestmark = pytest.mark.one_schedule
NAME = "moe_mps_sinks_test"


@pytest.fixture(params=[attention_mask, attention_mask_in_windows])
def registered(monkeypatch, request):
    for interface, function in ((AttentionInterface, attention), (AttentionMaskInterface, request.param)):
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
    """Few tokens and prompts, with a mask or without."""
    module, calls = layer().to(dtype), calls_of(monkeypatch)
    eager = gpt_oss.eager_attention_forward
    for tokens, keys in ((1, 20), (8, 30), (30, 30)):
        q, k, v = inputs("cpu", dtype, tokens, keys)
        mask = additive(tokens, keys, 6, dtype)
        expected, _ = eager(module, q, k, v, mask, scaling=0.3)
        calls.clear()
        on_device = [t.to(device) for t in (q, k, v)]
        moved = layer().to(dtype).to(device)
        moved.sinks.copy_(module.sinks)
        masks = [mask.to(device), (mask == 0).to(device)]
        for given in [*masks, None] if tokens in (1, keys) else masks:
            out, _ = attention(
                moved, *on_device, given, scaling=0.3, sliding_window=6, s_aux=moved.sinks, position_ids=None
            )
            tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
        assert not calls


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


def test_several_tokens_without_a_mask_are_the_first(device):
    """Of a static cache that is empty but for them."""
    module = layer().to(device)
    q, k, v = inputs(device, torch.float32, 5, 12)
    out, _ = attention(module, q, k, v, None, scaling=0.3, sliding_window=3, s_aux=module.sinks)
    shown = [t[:, :, :5].cpu() for t in (q, k, v)]
    expected, _ = gpt_oss.eager_attention_forward(
        module.cpu(), *shown, additive(5, 5, 3, torch.float32), scaling=0.3
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_without_code_of_the_model():
    module = torch.nn.Identity()
    q, k, v = inputs("cpu", torch.float32, 9, 9)
    with pytest.raises(
        RuntimeError, match="attention of Identity must be in a file with eager_attention_forw"
    ):
        attention(module, q, k, v, None, scaling=0.3, dropout=0.1)


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


# Models ------------------------------------------------------------------------------------------------


def steps(model, ids) -> list[torch.Tensor]:
    """The logits of a prompt, of a few tokens and of one token more."""
    results, cache = [], None
    with torch.no_grad():
        for part in ids.split([ids.shape[1] - 4, 3, 1], 1):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            results.append(out[0].float().cpu())
            cache = out.past_key_values
    return results


def attention_kernels(simulated, run) -> list[str]:
    with simulated.trace() as commands:
        run()
    return [line.split()[0] for line in commands if line.startswith("attention")]


ALWAYS = ["mixtral", "gemma4", "deepseek_v3", "gpt_oss"]
# hy_v4 asks for the name of its implementation, inkling and inkling2 add a bias for each position.
OWN = ["hy_v4", "inkling", "inkling2"]
NO_CACHE = ["openai_privacy_filter"]
IN_THE_SWEEP = sorted(set(tiny_models.architectures()) - {*ALWAYS, *OWN, *NO_CACHE})


@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.sweep) for name in [*IN_THE_SWEEP, *OWN])]
)
def test_models(simulated, name):
    """Few new tokens run on the operator, and the prompts of gpt-oss and DeepSeek."""
    model = tiny_models.tiny_model(name).to("mps").eval()
    decoder = model.get_decoder()
    layers = sum(getattr(module, "is_causal", False) is True for module in decoder.modules())
    ids = torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(1)).to("mps")
    expected = steps(model, ids)
    torch_moe_mps.accelerate(model)
    results = []
    kernels = attention_kernels(simulated, lambda: results.extend(steps(model, ids)))
    for ours, own in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
    assert len(kernels) in ([0] if name in OWN else [2 * layers, 3 * layers])
    assert name not in ALWAYS or len(kernels) == (3 if name in ("deepseek_v3", "gpt_oss") else 2) * layers
    torch_moe_mps.restore(model)
    assert attention_kernels(simulated, lambda: steps(model, ids)) == []


class Largest(TorchDispatchMode):
    """The most elements that a new tensor has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = out if isinstance(out, (tuple, list)) else (out,)
        sizes = [t.numel() for t in tensors if isinstance(t, torch.Tensor)]
        if not function.is_view:
            self.elements = max([self.elements, *sizes])
        return out


WIDE_HEADS = {
    **{"layer_types": ["full_attention"] * 2, "global_head_dim": 288},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1},
}


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "gemma4"])
def test_a_prompt_has_no_scores(simulated, monkeypatch, name):
    """No tensor has an element for each pair of tokens: neither scores nor a mask."""
    extra = tiny_models.EXTRA["gemma4_text"] | WIDE_HEADS
    monkeypatch.setitem(tiny_models.EXTRA, "gemma4_text", extra)
    model, tokens = tiny_models.tiny_model(name).to("mps").eval(), 500
    torch_moe_mps.accelerate(model)
    with torch.no_grad(), Largest() as largest:
        model(torch.ones(1, tokens, dtype=torch.int64, device="mps"), use_cache=True, logits_to_keep=1)
    assert 0 < largest.elements < tokens * tokens
