"""MiniMax-01's cache with its states in layers stands for the one that its code insists on."""

import copy

import pytest
import torch
from support.models import eager, generate, in_parts, prompt
from support.tiny_models import tiny_model
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import torch_moe_mps
from torch_moe_mps.transformers.caches.prompt_cache import new_cache
from torch_moe_mps.transformers.upstream.calls import cache_argument


@pytest.mark.parametrize("accelerates", [False, True])
def test_it_holds_what_transformers_own_holds(accelerates):
    model, own, ids = eager(tiny_model("minimax")), eager(tiny_model("minimax")), prompt(2, 12)
    if accelerates:
        torch_moe_mps.accelerate(model)
    found, cache = in_parts(model, ids, 1, 2, cache=new_cache(model))
    expected, theirs = in_parts(own, ids, 1, 2, cache=MiniMaxCache())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        cache.get_linear_cache(1), theirs.get_linear_cache(1), atol=1e-5, rtol=1e-5, check_stride=False
    )
    assert len(cache) == len(theirs) == 2 and "linear_cache" not in vars(cache)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_it(beams):
    """Beams, too, which in a MiniMaxCache leave states where they are."""
    model, ids = eager(tiny_model("minimax")), prompt(1)
    expected = generate(model, ids, num_beams=beams, use_cache=False)
    torch_moe_mps.accelerate(model)
    cache = new_cache(model)
    assert torch.equal(generate(model, ids, num_beams=beams, **cache_argument(model, cache)), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@torch.no_grad()
def test_it_is_saved_and_read(tmp_path):
    model, ids = eager(tiny_model("minimax")), prompt(1, 20)
    expected = generate(model, ids)
    torch_moe_mps.accelerate(model)
    cache = new_cache(model)
    model(ids[:, :12], **cache_argument(model, cache), use_cache=True)
    torch_moe_mps.save_prompt_cache(tmp_path / "kept", model, ids[:, :12], cache)
    _, read = torch_moe_mps.load_prompt_cache(tmp_path / "kept", model)
    for given in (read, copy.deepcopy(cache)):
        assert torch.equal(generate(model, ids, **cache_argument(model, given)), expected)
