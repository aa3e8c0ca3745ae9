"""What a module's own code reads may change in an accelerated model: that is followed, or refused."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, output, prompt, tiny
from torch import nn

import torch_moe_mps


def pair(architecture: str, bits: int | None):
    own = tiny(architecture)
    fast = copy.deepcopy(own)
    torch_moe_mps.accelerate(fast, bits, bits and 32)
    return fast, tiny_models.dense_twin(own, fast)


def on_instance(path: str, name: str, made):
    """Gives a module a method of its own, which does something else with the result of its class's."""

    def change(model):
        module = model.get_submodule(path)
        own = getattr(module, name)
        setattr(module, name, lambda *args: made(*own(*args)) if made is routed else made(own(*args)))

    return change


def routed(weights, ids):
    return 2 * weights, ids


def twice(result):
    return 2 * result


def doubled(module, args, result):
    return tuple(2 * each for each in result) if isinstance(result, tuple) else 2 * result


def hook(path: str):
    return lambda model: model.get_submodule(path).register_forward_hook(doubled)


def set_to(path: str, name: str, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def class_on_top(path: str):
    def change(model):
        module = model.get_submodule(path)
        cls = type(module)
        forward = lambda self, *args, **kwargs: 2 * cls.forward(self, *args, **kwargs)  # noqa: E731
        module.__class__ = type(cls.__name__, (cls,), {"forward": forward})

    return change


DBRX, JETMOE = "transformer.blocks.0.ffn", "model.layers.0.mlp"
LLAMA4, STEP3P7 = "model.layers.0.feed_forward", "model.language_model.layers.0.mlp.experts"
LONGCAT = "model.layers.0.mlp"
REFUSED = "packed \\w+ must compute what they did when they were packed"
# (architecture, change, whether packed experts follow it, too)
CHANGES = {
    "Llama 4: top_k": ("llama4", set_to(f"{LLAMA4}.router", "top_k", 2), True),
    "Llama 4: a class on its experts": ("llama4", class_on_top(f"{LLAMA4}.experts"), True),
    "DBRX: method of an instance": ("dbrx", on_instance(DBRX, "route_tokens_to_experts", routed), True),
    "DBRX: activation": ("dbrx", set_to(f"{DBRX}.experts.mlp", "activation_fn", nn.Tanh()), True),
    "DBRX: hook of the matrices": ("dbrx", hook(f"{DBRX}.experts.mlp"), False),
    "JetMoE: activation": ("jetmoe", set_to(JETMOE, "activation", nn.Tanh()), True),
    "JetMoE: top_k": ("jetmoe", set_to(f"{JETMOE}.router", "top_k", 3), True),
    "JetMoE: hook of a stack": ("jetmoe", hook(f"{JETMOE}.output_linear"), False),
    "Step-3.7: method of an instance": ("step3p7", on_instance(STEP3P7, "_apply_gate", twice), True),
    "LongCat: identity": ("longcat_flash", hook(f"{LONGCAT}.experts.identity_expert"), False),
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change(name, bits):
    architecture, change, is_followed = CHANGES[name]
    fast, own = pair(architecture, bits)
    before = output(own, prompt())
    for model in (fast, own):
        change(model)
    expected = output(own, prompt())
    assert (expected - before).abs().max() > 1e-3
    if bits is None or is_followed:
        assert_close(output(fast, prompt()), expected, 1e-5)
    else:
        with pytest.raises(ValueError, match=REFUSED):
            output(fast, prompt())
