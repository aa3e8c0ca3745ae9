"""Eager attention of very long prompts on GPUs whose batched products torch sums wrongly."""

import warnings

import pytest
import torch
from support import tiny_models
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.caches.cache import grow_cache
from torch_moe_mps.selfcheck import control, long_sums

KEYS = long_sums.TERMS - 20  # in the cache before the prompt's last tokens


def reads_on(first, second):
    """A product that sums 32 further elements after the operands, as on an M1."""
    out = torch.matmul(first.cpu(), second.cpu())
    if first.shape[-1] < long_sums.TERMS or min(out.shape[1:]) < long_sums.ROWS:
        return out.to("mps")
    flat = torch.as_strided(first, (first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    return (out + 32 * flat[-1].item() ** 2).to("mps")


@pytest.fixture
def m1(simulated):
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm", reads_on, "MPS")
    for function in (long_sums.is_wrong, long_sums.warn_of_eager_attention):
        function.cache_clear()
    yield
    library._destroy()
    for function in (long_sums.is_wrong, long_sums.warn_of_eager_attention):
        function.cache_clear()


def said_for(keys: int, tokens: int, implementation: str = "eager") -> list[str]:
    """Warnings of a decoder's call, before it computes."""
    model = tiny_models.tiny_model("llama", torch.float32)
    model.set_attn_implementation(implementation)
    torch_moe_mps.accelerate(model := model.to("mps"), check=False)
    cache, state = DynamicCache(config=model.config), torch.zeros(1, 1, 1, 4).to("mps")
    for layer in range(model.config.num_hidden_layers):
        cache.update(state.expand(1, 1, keys, 4), state.expand(1, 1, keys, 4), layer)
    ids = torch.ones(1, tokens, dtype=torch.int64).to("mps")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grow_cache(model.model, (), {"input_ids": ids, "past_key_values": cache})
    return [str(each.message) for each in caught]


def test_eager_attention_of_so_many_keys_is_warned_of_once(m1):
    assert said_for(KEYS, 19) == said_for(KEYS, 20, "sdpa") == []  # a key too few; torch's own kernels
    assert said_for(KEYS + 20, 15) == []  # too few tokens: a decode step has one
    (line,) = said_for(KEYS, 20)
    assert "the eager attention of LlamaModel has 32,767 keys or more" in line
    assert said_for(KEYS, 20) == []


def test_nothing_is_said_where_the_gpu_sums_right(simulated):
    long_sums.is_wrong.cache_clear()
    long_sums.warn_of_eager_attention.cache_clear()
    assert not long_sums.is_wrong()
    assert said_for(KEYS, 20) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_control_finds_it(m1, monkeypatch, dtype):
    every = [call for call in control.calls() if "bmm" in call[0]]
    monkeypatch.setattr(control, "calls", lambda: iter(every))
    count, findings = control.control({"x": dtype})
    assert count == 2 and [each.subject for each in findings] == ["torch's own bmm of over 32,767 terms"]
