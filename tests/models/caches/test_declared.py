"""Declarations of layers of caches: they name all that a layer holds, and the axes of its tensors."""

import pytest
import torch
from support import tiny_models
from support.models import eager
from support.sweep import in_sweep
from transformers.cache_utils import DynamicLayer

import torch_moe_mps
from torch_moe_mps.models.caches.declared import declaration_of
from torch_moe_mps.models.caches.prompt_cache import new_cache, takes_layers
from torch_moe_mps.models.caches.state import LayerState
from torch_moe_mps.models.upstream.calls import cache_argument

OFTEN = ("deepseek_v4", "gpt_oss", "qwen4_exp", "minimax_m3_vl", "jamba", "unlimited_ocr")
# They give no logits of text.
OTHERS = {"diffusion_gemma", "muse_spark", "qwen3_omni_moe", "openai_privacy_filter"}
ARCHITECTURES = sorted({*tiny_models.architectures(), "mamba2"} - OTHERS)
BATCH = 5  # no other size of these models: positions of text, height and width are 3


def caches_of(architecture: str, is_accelerated: bool):
    """A cache of some tokens, and one of a token more."""
    model = eager(tiny_models.tiny_model(architecture))
    if is_accelerated:
        torch_moe_mps.accelerate(model)
    if not takes_layers(model):
        pytest.skip("its states are in no cache")
    for tokens in (21, 22):
        cache = new_cache(model)
        ids = torch.randint(2, 90, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for part in ids.split((20, *[1] * (tokens - 20)), 1):
                model(input_ids=part, **cache_argument(model, cache), use_cache=True)
        yield cache


@pytest.mark.slow("two conversations of a model, twice")
@pytest.mark.parametrize("is_accelerated", [False, True])
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, OFTEN))
def test_all_that_layers_hold_is_declared(architecture, is_accelerated):
    """Names by name; of a token more, the axis of tokens of a tensor alone may be longer."""
    first, second = caches_of(architecture, is_accelerated)
    for layer, longer in zip(first.layers, second.layers, strict=True):
        held = declaration_of(type(layer))
        assert {*vars(layer)} <= {*held.names}, type(layer).__name__
        assert {name for name, value in vars(layer).items() if type(value) is dict} <= {*held.mappings}
        others = LayerState(longer).tensors()
        for name, tensor in LayerState(layer).tensors().items():
            axes = held.tensors[name.key] if not name.dictionary else held.mappings[name.dictionary]
            shapes = [*tensor.shape], [*others[name].shape]
            if axes.batch is not None:
                assert shapes[0][axes.batch] == BATCH, name
            if axes.time is not None:
                shapes[1][axes.time] = shapes[0][axes.time]
            assert shapes[0] == shapes[1], name


def test_a_class_of_somebody_else_is_not_declared():
    class Other(DynamicLayer):
        """Holds what nobody knows."""

    assert declaration_of(Other) is None and declaration_of(DynamicLayer) is not None
    with pytest.raises(ValueError, match="layers of a cache must be of declared classes, got a Other"):
        LayerState(Other())
