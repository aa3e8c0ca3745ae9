"""Indexers of sparse attention: what they choose, and that they only write while all keys may be chosen."""

import copy

import pytest
import torch
from support import tiny_models
from support.launches import launches
from support.models import assert_close, eager, edit_forward, in_parts, operators_of, output
from support.recognition import by_operators
from support.sweep import in_sweep
from support.tiny_models import modelling, tiny_config, tiny_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

import torch_moe_mps
from torch_moe_mps.models.attention.indexer import indexer_forward, rewrite_indexer
from torch_moe_mps.models.basics.state import state_of
from torch_moe_mps.models.basics.tensors import constant
from torch_moe_mps.models.upstream.calls import cache_argument

# What turns first or last, in halves or in pairs; layers that share what another has chosen; sinks; queries
# from a norm, with factors by position; windows beside.
ARCHITECTURES = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "dots3_note", "axk2"]
IDS = torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(0))


def model_with(architecture: str, top_k: int, **options):
    model = tiny_model(architecture, **options)
    found = [module for module in model.modules() if isinstance(getattr(module, "index_topk", None), int)]
    for module in found:
        module.index_topk = top_k
    assert found
    return model


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("glm_moe_dsa", "hy_v4", "axk2")))
def test_logits(architecture):
    """Of a prompt, a token and a few, where some keys are chosen and where all are."""
    for top_k in (5, 64):
        model = model_with(architecture, top_k)
        expected, _ = in_parts(eager(copy.deepcopy(model)).double(), IDS, 1, 3)
        before = model.config.get_text_config()._attn_implementation
        report = torch_moe_mps.accelerate(model)
        assert "_index_topk" in str(report)
        ran = operators_of(lambda m=model, e=expected: check_parts(m, e))
        assert ("_index_topk" in ran) == (top_k == 5)
        torch_moe_mps.restore(model)
        assert model.config.get_text_config()._attn_implementation == before


def check_parts(model, expected):
    for ours, right in zip(in_parts(model, IDS, 1, 3)[0], expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-4)


def test_on_mps(simulated):
    """Latents of chosen keys for few tokens, masks of bits for a prompt; padded rows."""
    model = model_with("hy_v4", 5)
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    own = eager(copy.deepcopy(model)).double()
    expected, _ = in_parts(own, IDS, 1, 3)
    padded = output(own, IDS, attention_mask=mask)
    model = model.to("mps")
    torch_moe_mps.accelerate(model)
    check_parts_on_mps(model, expected)
    result = output(model, IDS.to("mps"), attention_mask=mask.to("mps")).cpu()
    assert_close(result[0, 6:], padded[0, 6:].float(), 1e-4)
    assert_close(result[1], padded[1].float(), 1e-4)


def check_parts_on_mps(model, expected):
    found = by_operators(lambda: in_parts(model, IDS.to("mps"), 1, 3)[0], "_index_topk")
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-4)


def test_prompts_of_more_tokens_than_latents_take(simulated, monkeypatch):
    """Their keys and values are expanded; what is chosen becomes bits."""
    monkeypatch.setattr("torch_moe_mps.models.attention.visible.MOST_OF_LATENTS", 2)
    monkeypatch.setattr("torch_moe_mps.models.attention.visible._AT_ONCE", 5)
    model = model_with("deepseek_v32", 5)
    expected, _ = in_parts(eager(copy.deepcopy(model)).double(), IDS, 1, 3)
    model = model.to("mps")
    torch_moe_mps.accelerate(model)
    check_parts_on_mps(model, expected)


def test_an_indexer_of_few_keys_only_writes(simulated):
    """No query, no score and no choice; a token launches two operators for it."""
    model = model_with("deepseek_v32", 64).to(torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    indexer = next(module for module in model.modules() if hasattr(module, "index_topk"))
    calls = []
    indexer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:1, :4].to("mps"), **cache_argument(model, cache))
        model(IDS[:1, 4:5].to("mps"), **cache_argument(model, cache))
    (args, kwargs), forward = calls[-1], type(indexer).forward
    counts = launches(simulated, lambda: forward(indexer, *args, **kwargs))
    assert sum(counts.values()) <= 2, counts


def model_of_blocks(block: int):
    """MiniMax M3, of whose blocks of keys a token reads its own and another one."""
    model = tiny_model("minimax_m3_vl")
    (indexer,) = (module for module in model.modules() if hasattr(module, "topk_blocks"))
    indexer.block_size, indexer.topk_blocks = block, 2
    return model


def test_chosen_blocks(device, monkeypatch):
    """Its own mask is what a prompt, a token and a few see; of what is padded, too."""
    ids = torch.randint(1, 90, (2, 103), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 70:] = 0
    model = model_of_blocks(4)
    own = eager(copy.deepcopy(model)).double()
    expected, _ = in_parts(own, ids, 1, 3)
    padded = output(own, ids, attention_mask=mask)
    model = model.to(device)
    monkeypatch.setattr("torch_moe_mps.models.attention.chosen_keys._AT_ONCE", 50)
    report = torch_moe_mps.accelerate(model)
    assert "_index_topk" in str(report)
    found, cache = by_operators(lambda: in_parts(model, ids.to(device), 1, 3), "_index_topk")
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-4)
    result = output(model, ids.to(device), attention_mask=mask.to(device)).cpu()
    assert_close(result[0, :70], padded[0, :70].float(), 1e-4)
    assert_close(result[1], padded[1].float(), 1e-4)
    # The keys of the indexer grow in place, in a cache that was cropped, too.
    place = cache.layers[1].idx_keys.data_ptr()
    cache.crop(-3)
    again = in_parts(model, ids[:, -3:].to(device), 1, 1, cache=cache)[0]
    torch.testing.assert_close(torch.cat(again, 1), found[2], rtol=1e-4, atol=1e-4)
    cropped = cache.layers[1].idx_keys.data_ptr()
    in_parts(model, ids[:, :2].to(device), 1, cache=cache)
    assert cache.layers[1].idx_keys.data_ptr() == cropped == place


def test_a_token_reads_the_blocks_that_are_chosen(simulated):
    model = model_of_blocks(32).to("mps")
    torch_moe_mps.accelerate(model)
    cache = in_parts(model, torch.ones(1, 200, dtype=torch.int64, device="mps"))[1]
    with torch.no_grad(), simulated.counters() as dispatches:
        model(torch.ones(1, 1, dtype=torch.int64, device="mps"), **cache_argument(model, cache))
    full, sparse = (d for d in dispatches if d.kernel.startswith("attention"))
    assert "selected" in sparse.kernel and "selected" not in full.kernel
    keys, blocks = (sum(d.buffers[number].distinct_bytes_read for number in (1, 2)) for d in (full, sparse))
    assert 0 < blocks <= keys * (32 + 201 % 32) // 201


def indexer_of(architecture: str, heads: int) -> nn.Module:
    """An indexer as wide as those of large models, without its weights."""
    config = tiny_config(architecture, index_n_heads=heads, index_head_dim=128, hidden_size=2048)
    file = modelling(architecture)
    (cls,) = (cls for name, cls in vars(file).items() if name.endswith("Indexer"))
    with torch.device("meta"):
        return cls(config.get_text_config(), 0)


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("hy_v4", "axk2")))
def test_few_heads_are_recognised(architecture):
    """relu leaves no score for many of their keys, of which a trial knows no order."""
    for heads in (2, 4, 16):
        forward, _ = rewrite_indexer(indexer_of(architecture, heads))
        assert forward is indexer_forward, heads


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_an_indexer_without_relu_is_another_one(heads):
    """A head by itself gives keys the same order with relu and without."""
    indexer = indexer_of("deepseek_v32", heads)
    edit_forward(indexer, "F.relu(scores)", "scores")
    assert rewrite_indexer(indexer) is None


def test_one_that_is_rewritten_is_recognised_without_a_change():
    """As where another class is put on top; a trial never runs with the module's own state."""
    model = model_with("deepseek_v32", 5)
    torch_moe_mps.accelerate(model)
    indexer = next(module for module in model.modules() if isinstance(module, DeepseekV32Indexer))
    before = {**vars(state_of(indexer))}
    assert rewrite_indexer(indexer)[0] is indexer_forward
    assert {**vars(state_of(indexer))} == before and type(indexer) is not DeepseekV32Indexer


def test_an_implementation_that_is_set_later():
    """transformers' own two make masks of what is chosen, which must be keys, where `sdpa` is wrapped too."""
    torch_moe_mps.accelerate(tiny_model("qwen3_moe"))
    model = model_with("glm_moe_dsa", 5)
    expected = output(eager(copy.deepcopy(model)), IDS)
    torch_moe_mps.accelerate(model)
    for name in ("sdpa", "eager", "moe_mps"):
        model.set_attn_implementation(name)
        run = lambda: output(model, IDS)  # noqa: E731
        found = by_operators(run, "_index_topk") if name == "moe_mps" else run()
        assert_close(found, expected, 1e-5)


# By sizes of the config at which a token reads two pools of four keys beside its own.
POOLED = {
    "glm5_next": {"index_kpool": 4, "index_topk": 8, "index_head_dim": 16, "kv_lora_rank": 16},
    "qwen4_exp": {"indexer_compress_ratio": 4, "indexer_budget": 8},
}


def model_of_pools(architecture: str, monkeypatch):
    """A model whose two layers have indexers."""
    text = f"{architecture}_text"
    own = tiny_models.EXTRA[text] | {"layer_types": ["indexed_attention"] * 2}
    monkeypatch.setitem(tiny_models.EXTRA, text, own | POOLED[architecture])
    return tiny_model(architecture)


@pytest.mark.parametrize("architecture", in_sweep(POOLED, ("qwen4_exp",)))
def test_chosen_pools(simulated, architecture, monkeypatch):
    """Prompts, and tokens that close pools or do not; padded rows run the model's own code."""
    monkeypatch.setattr("torch_moe_mps.models.attention.chosen_keys._AT_ONCE", 5)
    ids = torch.randint(1, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    shown = torch.ones_like(ids)
    shown[0, :9] = 0
    model = model_of_pools(architecture, monkeypatch)
    own = eager(copy.deepcopy(model)).double()
    expected, _ = in_parts(own, ids, 11, 3, *[1] * 6)
    padded = output(own, ids, attention_mask=shown)
    model = model.to("mps")
    torch_moe_mps.accelerate(model)
    cache = DynamicCache(config=model.config)
    ran = operators_of(lambda: in_parts(model, ids[:, :20].to("mps"), 11, 3, 1, cache=cache))
    assert "_index_topk" in ran
    found, cache = in_parts(model, ids.to("mps"), 11, 3, *[1] * 6)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-4)
    result = output(model, ids.to("mps"), attention_mask=shown.to("mps")).cpu()
    assert_close(result[0, 9:], padded[0, 9:].float(), 1e-4)
    assert_close(result[1], padded[1].float(), 1e-4)
    # A cache that was cropped goes on with the pools that are left.
    cache.crop(-7)
    again = in_parts(model, ids[:, -7:].to("mps"), 1, *[1] * 5, cache=cache)[0]
    torch.testing.assert_close(torch.cat(again[1:], 1), torch.cat(found[-6:], 1), rtol=1e-4, atol=1e-4)


def test_a_constant_that_a_recording_made_is_not_held():
    """It is fake, and every later call would get it."""
    with FakeTensorMode():
        assert type(constant("test", lambda: torch.ones(3))) is FakeTensor
    held = constant("test", lambda: torch.ones(3))
    assert type(held) is torch.Tensor and constant("test", lambda: torch.zeros(3)) is held
    assert len(constant("test", lambda: torch.ones(5), 5)) == 5
