"""Sequences of a batched cache are isolated: no value of a finished one reaches the next in its place."""

import torch
from support import tiny_models
from support.models import eager
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.caches.state import LayerState
from torch_moe_mps.models.upstream.calls import cache_argument


@torch.no_grad()
def test_nan_of_one_who_left_does_not_reach_the_next():
    """The next in its place is shorter, so that a mask hides what lies in front of its tokens."""
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    torch_moe_mps.accelerate(model)

    def read(length, number):
        ids = torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(number))
        cache = DynamicCache(config=model.config)
        model(ids, **cache_argument(model, cache), use_cache=True)
        return ids, cache

    rows = BatchedCache(model)
    _, long = read(20, 1)
    _, spoilt = read(18, 2)
    for layer in spoilt.layers:
        for tensor in LayerState(layer).tensors().values():
            tensor.fill_(torch.nan)
    ids, short = read(5, 3)
    rows.admit(long, 20)
    rows.admit(spoilt, 18)
    rows.finish(1)
    rows.admit(short, 5)
    expected = model(torch.cat((ids, torch.tensor([[8]])), 1), use_cache=False).logits[0, -1]
    others = rows.arguments()  # which may move the cache
    tokens = torch.tensor([[7], [8]])
    found = model(input_ids=tokens, **cache_argument(model, rows.cache), **others).logits[1, -1]
    torch.testing.assert_close(found, expected)
