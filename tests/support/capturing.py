"""Models whose tokens are captured, and copies of them whose tokens are not."""

import copy

import torch
from torch import nn

import torch_moe_mps
from support import tiny_models
from support.models import eager, prompt
from torch_moe_mps.models.basics.state import state_in
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

PROMPT = 9


def accelerated(architecture: str, device: str, dtype=torch.float32, sizes=(), **options) -> nn.Module:
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture, dtype, **dict(sizes))).to(device)
    torch_moe_mps.accelerate(model, **options)
    return model


def without_capture(model: nn.Module) -> nn.Module:
    for module in model.modules():
        state_in(module).captures = None
    return model


def pair(*arguments, **options) -> tuple[nn.Module, nn.Module]:
    """An accelerated model, and a copy of it whose tokens are not captured."""
    model = accelerated(*arguments, **options)
    return model, without_capture(copy.deepcopy(model))


def assert_equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(results, expected, strict=True)] == [True] * len(expected)


def answer(model: nn.Module, device: str, padding: int = 0) -> list[torch.Tensor]:
    """The logits of six tokens behind a prompt, or behind two, of which the second is padded on its left."""
    batch = 2 if padding else 1
    shown = torch.ones(batch, PROMPT + 6, dtype=torch.int64, device=device)
    shown[1:, :padding] = 0

    def call(ids, end, cache=None):
        mask = {"attention_mask": shown[:, :end]} if padding else {}
        return model(ids, **mask, **cache_argument(model, cache))

    ids = prompt(batch, PROMPT).to(device)
    cache = cache_among(call(ids, PROMPT, new_cache(model)))
    tokens = torch.arange(3, 3 + 6 * batch, device=device).view(6, batch, 1)
    return [call(each, PROMPT + n, cache)[0].cpu() for n, each in enumerate(tokens, 1)]


def norm(model):
    return model.model.layers[0].post_attention_layernorm


def double(module, args, result=None):
    return None if result is None else 2 * result
