"""Latent attention that does not expand its latents, against transformers' own code."""

import copy
import pickle

import pytest
import torch
from support import tiny_models
from support.models import eager, in_parts
from support.sweep import in_sweep
from support.tiny_models import tiny_model
from torch import nn
from transformers import DynamicCache, StaticCache

import torch_moe_mps
from torch_moe_mps.models.attention import attention, latents
from torch_moe_mps.models.attention.latents import Expansion, LazyLatents, expansion_of
from torch_moe_mps.models.attention.visible import Visible
from torch_moe_mps.models.caches.growing import latents_together
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.upstream.calls import cache_argument

# Sinks, and nothing that turns; both select keys by an indexer.
OFTEN = ("deepseek_v3", "hy_v4", "glm5_next")
MODELS = [*OFTEN, "kimi_linear", "deepseek_v2", "glm4_moe_lite", "mistral4", "axk1", "bailing_hybrid"]
MODELS += ["glm_moe_dsa", "deepseek_v32", "axk2", "mistral_large4", "dots3_note", "longcat_flash", "youtu"]
MODELS.append("minicpm3")
IDS = torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(0))


def kernels(simulated, call) -> list[str]:
    with torch.no_grad(), simulated.trace() as commands:
        call()
    return [line.split()[0] for line in commands if " grid " in line]


def layers_of(model) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


@pytest.mark.parametrize("name", in_sweep(MODELS, OFTEN))
def test_models(simulated, name):
    """The logits of a prompt, of a token and of a few, as in float64; nothing is expanded."""
    model = tiny_model(name)
    expected, _ = in_parts(eager(copy.deepcopy(model)).double(), IDS, 1, 3)
    model = model.to("mps")
    report = torch_moe_mps.accelerate(model)
    layers = layers_of(model)
    assert str(report).count("latents (_heads_mm)") > 0
    results = []
    launched = kernels(simulated, lambda: results.extend(in_parts(model, IDS.to("mps"), 1, 3)))
    logits, cache = results
    for ours, right in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-4)
    for kernel in ("heads_columns", "heads_rows"):
        assert sum(name.startswith(kernel) for name in launched) == 3 * len(layers)
    for layer in layers:
        held = cache.layers[layer.layer_idx]
        assert latents_together(held.keys, held.values).shape[3] == held.keys.shape[3] + held.values.shape[3]


def test_quantised_weights(simulated):
    """The rows of the quantised projection, where they lie: as if it expanded the latents."""
    with tiny_models.groups_of_32(), tiny_models.sizes(q_lora_rank=32, kv_lora_rank=32):
        model = tiny_model("deepseek_v3").to("mps")
    report = torch_moe_mps.accelerate(model, 4, 32)
    assert "latents (_heads_quantized)" in str(report)
    results = []
    launched = kernels(simulated, lambda: results.append(logits_of(model)))
    assert sum(name.startswith("heads_") for name in launched) == 4
    for layer in layers_of(model):
        layer.__dict__["_moe_mps"].expansion = None
    torch.testing.assert_close(results[0], logits_of(model), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def model():
    """A tiny model and what its own code gives."""
    return tiny_model("deepseek_v3").to("mps")


def accelerated(model):
    ours = copy.deepcopy(model)
    torch_moe_mps.accelerate(ours)
    return ours


def assert_as_before(simulated, ours, own, call, absorbs):
    """Both give the same; `absorbs`: whether ours attends to latents."""
    results = []
    launched = kernels(simulated, lambda: results.append(call(ours)))
    assert any(name.startswith("heads_") for name in launched) == absorbs
    torch.testing.assert_close(results[0], call(own), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits_of(model, ids=IDS, **options):
    return model(ids.to("mps"), **options).logits.cpu()


def test_caches_and_masks(simulated, model):
    """Padding, static caches, no cache, beams, crops and copies of a cache."""
    ours = accelerated(model)
    shown = torch.ones_like(IDS)
    shown[0, :5] = 0
    masked = {"attention_mask": shown.to("mps")}

    def padded(model):
        return logits_of(model, **masked)[shown == 1]

    def without_cache(model):
        return logits_of(model, use_cache=False)

    def static(model):
        cache = StaticCache(config=model.config, max_cache_len=40)
        logits_of(model, **cache_argument(model, cache))
        return logits_of(model, IDS[:, :2], **cache_argument(model, cache))

    def changed(model):
        cache = DynamicCache(config=model.config)
        logits_of(model, **cache_argument(model, cache))
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
        few = logits_of(model, IDS[:, :2].repeat(2, 1), **cache_argument(model, cache))
        cache.batch_select_indices(torch.tensor([1, 2]))
        for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            one = logits_of(model, IDS[:, :1], **cache_argument(model, again))
        return torch.cat([few.flatten(), one.flatten()])

    for call in (padded, without_cache, static, changed):
        assert_as_before(simulated, ours, model, call, absorbs=True)


def test_the_models_own_code_where_it_is_needed(simulated, model, monkeypatch):
    """Long prompts, hooks on the projection, other weights than linear ones, gradients, other attention."""
    ours = accelerated(model)
    monkeypatch.setattr(latents, "MOST_TOKENS", 15)
    assert_as_before(simulated, ours, model, logits_of, absorbs=False)
    monkeypatch.undo()
    seen = []
    handles = [layer.kv_b_proj.register_forward_hook(lambda *_: seen.append(1)) for layer in layers_of(ours)]
    assert_as_before(simulated, ours, model, logits_of, absorbs=False)
    assert len(seen) == 2 and [handle.remove() for handle in handles]
    assert_as_before(simulated, ours, model, logits_of, absorbs=True)
    with torch.enable_grad():
        assert ours(IDS.to("mps")).logits.requires_grad
    ours.set_attn_implementation("eager")
    assert_as_before(simulated, ours, model, logits_of, absorbs=False)
    ours.set_attn_implementation("sdpa")
    torch_moe_mps.restore(ours)
    assert_as_before(simulated, ours, model, logits_of, absorbs=False)


def test_a_long_prompt_expands_some_heads_at_a_time(simulated, monkeypatch):
    """The same results, in the memory of these heads' keys and values; in 8 bits, too."""
    with tiny_models.groups_of_32(), tiny_models.sizes(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32):
        model = tiny_model("deepseek_v3", head_dim=32).to("mps")
    torch_moe_mps.accelerate(model, 4, 32, kv_bits=8)
    ids = torch.randint(1, 90, (2, 140), generator=torch.Generator().manual_seed(0))
    results = []
    for most, calls in ((latents.MOST_BYTES, 1), (2 * 2 * 140 * (8 + 32 + 8) * 4, 2), (1, 4)):
        monkeypatch.setattr(latents, "MOST_BYTES", most)
        launched = kernels(simulated, lambda: results.append(logits_of(model, ids)))
        assert sum(name.startswith("attention") and "merge" not in name for name in launched) == 2 * calls
        torch.testing.assert_close(results[-1], results[0], rtol=1e-4, atol=1e-4)


def test_new_weights_are_seen(simulated, model):
    ours, own = accelerated(model), copy.deepcopy(model)
    for module in (*layers_of(ours), *layers_of(own)):
        module.kv_b_proj.weight.data = module.kv_b_proj.weight.data.flip(0)
    assert_as_before(simulated, ours, own, logits_of, absorbs=True)


def test_8_bits(simulated):
    """The latents lie in groups of 8 bits side by side; attention reads them as they are."""
    sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32}
    model = tiny_model("deepseek_v3", **sizes).to("mps")
    torch_moe_mps.accelerate(model)
    ids = IDS.to("mps")
    exact, _ = in_parts(model, ids, 1, 3)
    torch_moe_mps.accelerate(model, kv_bits=8)
    results = []
    launched = kernels(simulated, lambda: results.extend(in_parts(model, ids, 1, 3)))
    logits, cache = results
    for layer in cache.layers:
        together = latents_together(layer.keys, layer.values)
        assert isinstance(together, QuantizedStates) and together.shape[3] == 96
    assert sum(name.startswith("attention8_64_affine8") for name in launched) > 0
    for ours, right in zip(logits, exact, strict=True):
        assert (ours - right).norm() / right.norm() < 0.03


def attention_of(name):
    """A layer of the width of real models' latents, in float32; of few heads and inputs."""
    with tiny_models.sizes(kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128):
        model = tiny_model(name)
    return layers_of(model)[0].requires_grad_(False)


@pytest.mark.parametrize("name", in_sweep(MODELS, OFTEN[:1]))
def test_error_is_that_of_expanded_keys_and_values(simulated, name):
    """bfloat16 against float64, 300 cached latents, four queries.

    Keys and values are rounded there; only queries of the latents here.
    """
    module = attention_of(name)
    form = expansion_of(module)
    generator = torch.Generator().manual_seed(0)
    rotary = module.qk_rope_head_dim
    query = torch.randn(4, form.heads, 1, form.key_rows + rotary, generator=generator).bfloat16()
    parts = [torch.randn(4, 1, 300, width, generator=generator).bfloat16() for width in (512, rotary)]
    projection = module.get_submodule(form.projection)
    projection.weight.copy_(torch.randn(projection.weight.shape, generator=generator) / 512**0.5)
    module = module.bfloat16()
    exact = copy.deepcopy(module).double().expand_kv(*(part.double() for part in parts))
    right = nn.functional.scaled_dot_product_attention(query.double(), *exact)
    query, *parts = (tensor.to("mps") for tensor in (query, *parts))
    keys, values = module.to("mps").expand_kv(*parts)
    expanded = nn.functional.scaled_dot_product_attention(query, keys, values)
    own = latents.Latents(module, type(module).expand_kv, *parts)
    latents.state_of(module).expansion = form
    source = latents.LazyLatents(own, 0, form.heads, form.key_rows + rotary)
    visible, scores = Visible.by(None, query.shape[2]), attention.Scores(None)
    absorbed = attention._attend_to_latents(None, query, source, None, visible, scores).transpose(1, 2)
    errors = [(out.cpu().double() - right).norm() / right.norm() for out in (absorbed, expanded)]
    assert errors[0] <= errors[1] < 6e-3


def test_what_is_recognised():
    """What the method does, whatever it is called with; not another order of rows, nor an added bias."""
    module = attention_of("deepseek_v3")
    assert expansion_of(module) == Expansion("kv_b_proj", 4, 128, 128)
    assert expansion_of(nn.Linear(2, 2)) is None

    class Swapped(type(module)):
        def expand_kv(self, latents, rotated):
            keys, values = super().expand_kv(latents, rotated)
            return keys, values.flip(1)

    class Scaled(type(module)):
        def expand_kv(self, latents, rotated):
            return super().expand_kv(2 * latents, rotated)

    for cls in (Swapped, Scaled):
        module.__class__ = cls
        assert expansion_of(module) is None


@torch.no_grad()
def test_lazy_latents_have_the_values_of_eager_code(model):
    """Operators see the expanded keys and values."""
    ours = accelerated(model)
    layer, own = layers_of(ours)[0], layers_of(model)[0]
    parts = [torch.randn(2, 1, 5, width, device="mps") for width in (16, 8)]
    for lazy, right in zip(layer.expand_kv(*parts), own.expand_kv(*parts), strict=True):
        assert isinstance(lazy, LazyLatents) and "LazyLatents" in repr(lazy)
        assert lazy.shape == right.shape and lazy.dtype == right.dtype
        assert torch.equal(lazy + 0, right + 0) and torch.equal(torch.cat([lazy])[0], right[0])


@torch.no_grad()
def test_the_class_keeps_its_method(model, monkeypatch):
    """The lazy method is of the layer's own class; one that is put into the model's class runs."""
    ours = accelerated(model)
    layer, cls = layers_of(ours)[0], type(layers_of(model)[0])
    assert type(layer) is not cls and issubclass(type(layer), cls)
    parts = [torch.randn(2, 1, 5, width, device="mps") for width in (16, 8)]
    assert not any(isinstance(part, LazyLatents) for part in cls.expand_kv(layer, *parts))
    monkeypatch.setattr(cls, "expand_kv", lambda self, *parts: parts)
    assert all(part is given for part, given in zip(layer.expand_kv(*parts), parts, strict=True))
    monkeypatch.undo()
    torch_moe_mps.restore(ours)
    assert type(layer) is cls
