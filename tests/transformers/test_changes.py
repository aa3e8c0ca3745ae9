"""Attributes, hooks and classes that change after acceleration: the model still computes what its own code
does."""

import copy

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of, output, prompt
from torch import nn
from torch.nn.utils import parametrize
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

import torch_moe_mps
from torch_moe_mps.transformers import experts_of

transformers.logging.set_verbosity_error()


def pair(architecture: str):
    """A model accelerated, and one with the same weights that runs its own code."""
    own, fast = (eager(tiny_models.tiny_model(architecture)) for _ in range(2))
    fast.load_state_dict(own.state_dict())
    torch_moe_mps.accelerate(fast)
    return fast, own


def check(fast, own) -> None:
    assert_close(output(fast, prompt()), output(own, prompt()), 1e-5)


def block(model, name: str) -> nn.Module:
    """The first module of a model that is called `name`."""
    return next(module for path, module in model.named_modules() if path.rpartition(".")[2] == name)


def set_in_all(model, kind: str, name: str, value) -> int:
    """Sets an attribute of all modules whose class ends in `kind` and that have it."""
    found = [m for m in model.modules() if type(m).__name__.endswith(kind) and hasattr(m, name)]
    for module in found:
        setattr(module, name, value)
    return len(found)


ATTRIBUTES = [
    ("qwen3_moe", "Router", "norm_topk_prob", False),
    ("qwen3_moe", "Router", "norm_topk_prob", True),
    ("qwen3_moe", "Router", "top_k", 3),
    ("qwen3_moe", "Experts", "act_fn", nn.GELU()),
    ("qwen3_moe", "Experts", "act_fn", nn.Tanh()),
    ("qwen3_moe", "RMSNorm", "variance_epsilon", 0.5),
    ("gpt_oss", "Experts", "limit", 0.25),
    ("gpt_oss", "Experts", "alpha", 3.0),
    ("deepseek_v3", "Router", "routed_scaling_factor", 0.5),
    ("deepseek_v3", "Router", "norm_topk_prob", False),
    ("nemotron_h", "Experts", "act_fn", nn.SiLU()),
]


def test_the_implementation_of_attention_changes(monkeypatch):
    """The rewritten forward looks it up in every call."""
    fast, own = pair("qwen3_moe")
    calls, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "counted", counted)
    for name, times in (("eager", 0), ("counted", 2), ("sdpa", 2)):
        fast.set_attn_implementation(name)
        check(fast, own)
        assert len(calls) == times
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", counted)
    output(fast, prompt())
    assert len(calls) == 4
    block(fast, "self_attn").config._attn_implementation = "unknown"
    with pytest.raises(KeyError, match="`unknown` is not a valid attention implementation"):
        output(fast, prompt())


@pytest.mark.parametrize(("architecture", "cls", "name", "value"), ATTRIBUTES, ids=str)
def test_an_attribute_that_changes(architecture, cls, name, value):
    fast, own = pair(architecture)
    before = output(fast, prompt())
    for model in (fast, own):
        if not set_in_all(model, cls, name, value):
            pytest.fail(f"{architecture} has no {cls}")
    check(fast, own)
    assert name == "norm_topk_prob" or not torch.equal(output(fast, prompt()), before)
    torch_moe_mps.accelerate(fast)
    check(fast, own)


CHILDREN = ["input_layernorm", "input_layernorm.weight", "mlp.gate", "self_attn.q_norm", "self_attn.q_proj"]


@pytest.mark.parametrize("path", CHILDREN)
def test_what_is_written_over_a_child(path):
    """Into the instance's dictionary, where Python looks before it asks the module for its children."""
    fast, own = pair("qwen3_moe")
    before = output(fast, prompt())
    for model in (fast, own):
        layer = model.get_decoder().layers[0]
        owner, _, name = path.rpartition(".")
        new = copy.deepcopy(getattr(layer.get_submodule(owner), name))
        for parameter in [new] if isinstance(new, nn.Parameter) else new.parameters():
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        layer.get_submodule(owner).__dict__[name] = new
    check(fast, own)
    assert not torch.allclose(output(fast, prompt()), before, atol=1e-3)


# Hooks


@pytest.mark.parametrize("first", ["hook", "accelerate"])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_hook_on_the_activation(first, bits):
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model("qwen3_moe"))
    experts = next(iter(experts_of(model).values()))

    def accelerate():
        torch_moe_mps.accelerate(model, bits, bits and 32)

    if first == "accelerate":
        accelerate()
    calls = []
    handle = experts.act_fn.register_forward_hook(lambda module, args, result: calls.append(1) or 2 * result)
    if first == "hook":
        accelerate()
    hooked = output(model, prompt())
    assert calls
    if bits is None:
        model.set_experts_implementation("eager")
        torch_moe_mps.restore(model)
        assert_close(hooked, output(model, prompt()), 1e-5)
        torch_moe_mps.accelerate(model)
    handle.remove()
    calls.clear()
    assert not torch.allclose(output(model, prompt()), hooked) and not calls


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gemma4"])
def test_global_hooks_see_every_module(architecture):
    fast, own = pair(architecture)
    seen = {}
    for model in (fast, own):
        names = {module: name for name, module in model.named_modules()}
        called = seen[model] = []
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, result, called=called, names=names: called.append(names[module])
        )
        try:
            output(model, prompt())
        finally:
            hook.remove()
    assert set(seen[own]) <= set(seen[fast])
    assert any("post_attention_layernorm" in name for name in seen[fast])
    check(fast, own)


# Classes


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def gates(model) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def test_a_parametrised_router_survives():
    """Its class is on top of the rewritten one and runs its own code; an attribute beneath may change."""
    fast, own = pair("qwen3_moe")
    for model in (fast, own):
        for gate in gates(model):
            parametrize.register_parametrization(gate, "weight", Doubled())
    check(fast, own)
    torch_moe_mps.accelerate(fast)
    check(fast, own)
    torch_moe_mps.restore(fast)
    check(fast, own)
    torch_moe_mps.accelerate(fast)
    check(fast, own)
    assert "moe_router" not in operators_of(lambda: output(fast, prompt()))
    for gate in (*gates(fast), *gates(own)):
        gate.norm_topk_prob = not gate.norm_topk_prob
    check(fast, own)
    torch_moe_mps.accelerate(fast)
    check(fast, own)


@pytest.mark.parametrize("again", [torch_moe_mps.accelerate, torch_moe_mps.restore])
def test_a_subclass_that_a_user_puts_on_top_stays(again):
    fast, own = pair("qwen3_moe")
    layers = []
    for model in (fast, own):
        layer = model.model.layers[1].mlp

        class Negated(type(layer)):
            def forward(self, *args, **kwargs):
                return -super().forward(*args, **kwargs)

        layer.__class__ = Negated
        layers.append((layer, Negated))
    check(fast, own)
    again(fast)
    assert all(type(layer) is cls for layer, cls in layers)
    check(fast, own)


def test_a_wrapped_forward_survives_restore_and_accelerate():
    """The wrapper still calls the forward that was there when it was put on."""
    fast, own = pair("qwen3_moe")
    layer = fast.model.layers[0].mlp
    wrapped, calls = layer.forward, []
    layer.forward = lambda *args, **kwargs: calls.append(1) or wrapped(*args, **kwargs)
    check(fast, own)
    for change in (torch_moe_mps.restore, torch_moe_mps.accelerate, torch_moe_mps.accelerate):
        change(fast)
        calls.clear()
        check(fast, own)
        assert calls


PATCHES = ["Qwen3MoeRMSNorm", "Qwen3MoeRotaryEmbedding", "Qwen3MoeAttention", "Qwen3MoeDecoderLayer"]


@pytest.mark.parametrize("name", PATCHES)
def test_a_class_is_patched(monkeypatch, name):
    """Whoever gives a class another forward, as profilers and kernel packages do, is heard."""
    fast, own = pair("qwen3_moe")
    cls = getattr(qwen3_moe, name)
    forward, calls = cls.forward, []

    def patched(self, *args, **kwargs):
        calls.append(self)
        out = forward(self, *args, **kwargs)
        return tuple(x * 1.5 for x in out) if isinstance(out, tuple) and name.endswith("Embedding") else out

    check(fast, own)
    monkeypatch.setattr(cls, "forward", patched)
    check(fast, own)
    assert sum(call in [*fast.modules()] for call in calls) * 2 == len(calls) > 0


def test_a_function_is_patched(monkeypatch):
    fast, own = pair("qwen3_moe")
    rotate = qwen3_moe.apply_rotary_pos_emb
    before = output(fast, prompt())
    monkeypatch.setattr(qwen3_moe, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, k, sin, cos))
    assert (output(own, prompt()) - before).abs().max() > 1e-3
    check(fast, own)
