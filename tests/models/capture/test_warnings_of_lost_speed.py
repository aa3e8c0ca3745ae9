"""Speed that a model does not have is said: in the report, and in one warning."""

import warnings

import torch
from support import tiny_models
from support.models import prompt
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import torch_moe_mps


def said(model, run=None, **options) -> tuple[str, list[str]]:
    """The report, and the warnings of ours, of a model that is accelerated and then runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = torch_moe_mps.accelerate(model, **options)
        if run is not None:
            run(model)
    lines = (str(one.message) for one in caught)
    return str(report), [line for line in lines if line.startswith("torch_moe_mps: ")]


def generate(model) -> None:
    model.generate(prompt(1), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)


def test_a_token_that_asks_for_values(simulated):
    """Its second recording fails, too."""
    report, (line,) = said(tiny_models.other_model("xmod"), generate, capture=True)
    assert "a token could not be captured and runs module by module: it asks for values that only" in line
    assert "tokens run module by module: it asks for values that only the GPU knows" in report


class OtherLayer(DynamicLayer):
    """A layer of another release, or of somebody else."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states, *args, **kwargs)


def test_a_layer_that_is_not_known(simulated):
    def run(model):
        cache = DynamicCache(config=model.config)
        cache.layers = [OtherLayer() for _ in cache.layers]
        for _ in range(3):
            with torch.no_grad():
                model(prompt(1), **{name: cache})
        assert {type(layer) for layer in cache.layers} == {OtherLayer}

    model = tiny_models.other_model("cwm")
    name = "cache" if "cache" in type(model).forward.__wrapped__.__annotations__ else "past_key_values"
    _, (line,) = said(model, run)
    assert "the cache of CwmModel does not grow in place, and every token copies it: OtherLayer" in line
