"""What is remembered of one module says nothing of a near miss: of a subclass, with another attribute, or
with a child of another class. Every rule, with the plain module first and with its twin first.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, in_parts
from support.recognition import by_operators, forget, own_memory  # noqa: F401  # a fixture
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import (
    DeepseekV4Config,
    DeepseekV32Config,
    DynamicCache,
    JambaConfig,
    NemotronHConfig,
)
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

import torch_moe_mps
from torch_moe_mps.models.modules.rules import MODULE_RULES
from torch_moe_mps.transformers.install import is_rewritten, rewrite

pytestmark = pytest.mark.usefixtures("own_memory")
IDS = torch.randint(1, 90, (2, 22), generator=torch.Generator().manual_seed(0))


class Case(NamedTuple):
    """A module that a rule replaces: an attribute of it, or of a child, with another value, and a child."""

    rule: str
    architecture: str
    path: str
    attribute: tuple[str, object] | None = None
    child: str | None = None
    sizes: tuple = ()  # of the config

    def __str__(self) -> str:
        return f"{self.rule}-{self.architecture}-{self.path.rpartition('.')[2]}"


CASES = [
    Case("rotary", "qwen3_moe", "model.rotary_emb", ("attention_scaling", 1.5)),
    Case("rms_norm", "qwen3_moe", "model.norm", ("variance_epsilon", 0.5)),
    Case("router", "qwen3_moe", "model.layers.0.mlp.gate", ("norm_topk_prob", True)),
    Case("layer_norm", "cohere", "model.norm", ("variance_epsilon", 0.5)),
    Case("layer_norm", "phi", "model.final_layernorm", ("eps", 0.5)),  # torch's own class
    Case("gated_norm", "qwen3_next", "model.layers.0.linear_attn.norm", ("variance_epsilon", 0.5)),
    Case(
        *("recurrent_layer", "nemotron_h", "model.layers.0.mixer", ("time_step_limit", (0.9, 1.0)), "norm"),
        (("layers_block_type", ("mamba", "attention")),),
    ),
    Case(
        *("indexer", "deepseek_v32", "model.layers.0.self_attn.indexer", ("index_topk", 2), "wk"),
        (("index_topk", 6),),
    ),
    Case("compressed_attention", "deepseek_v4", "model.layers.0.self_attn", ("scaling", 2.0), "compressor"),
    Case("_hyper_connection", "deepseek_v4", "model.layers.0.attn_hc", ("hc_eps", 0.5), "input_norm"),
    Case("router", "deepseek_v4", "model.layers.1.mlp.gate", ("routed_scaling_factor", 9.0), "score_fn"),
]
MORE = [
    Case("mlp", "deepseek_v4", "model.layers.0.mlp.shared_experts", ("limit", 0.01), "act_fn"),
]
CHOOSE = ("indexer",)
QUANTISED = ("mlp",)
# What runs elsewhere only as its own code.
IN_ACCELERATED = (*CHOOSE, "compressed_attention", *QUANTISED)


def other_class(cls: type, near: Callable) -> type:
    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return near(cls.forward, self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def doubled(forward, self, *args, **kwargs):
    return tree_map_only(
        torch.Tensor, lambda x: 2 * x if x.is_floating_point() else x, forward(self, *args, **kwargs)
    )


def of_others(forward, self, *args, **kwargs):
    """What is chosen by other hidden states: a choice has no double, and doubled scores give the same one."""
    first, *others = args or [kwargs.pop("hidden_states")]
    return forward(self, first.flip(-1), *others, **kwargs)


def near(case: Case, module: nn.Module, change: str) -> nn.Module:
    module, other = copy.deepcopy(module), of_others if case.rule in CHOOSE else doubled
    if change == "forward":
        module.__class__ = other_class(type(module), other)
    elif change == "attribute":
        path, value = case.attribute
        owner, _, name = path.rpartition(".")
        assert hasattr(module.get_submodule(owner), name)
        setattr(module.get_submodule(owner), name, value)
    else:
        child = module.get_submodule(case.child)
        child.__class__ = other_class(type(child), other)
    return module


@functools.cache
def models_of(case: Case) -> tuple[nn.Module, nn.Module]:
    """A model that runs its own code, and the one that a replaced module is put in."""
    with tiny_models.groups_of_32(), tiny_models.sizes(**{k: v for k, v in case.sizes if type(v) is int}):
        options = {name: [*value] for name, value in case.sizes if type(value) is tuple}
        own = eager(tiny_models.tiny_model(case.architecture, **options))
    if case.rule not in IN_ACCELERATED:
        return own, own
    model = copy.deepcopy(own)
    if case.rule not in QUANTISED:
        torch_moe_mps.accelerate(model)
        return own, model
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return torch_moe_mps.restore(copy.deepcopy(model)), model


@functools.cache
def usual_output(case: Case) -> torch.Tensor:
    own, _ = models_of(case)
    return output(own, case, copy.deepcopy(own.get_submodule(case.path)))


def output(model: nn.Module, case: Case, module: nn.Module) -> torch.Tensor:
    """The logits of a model with another module in it."""
    before = model.get_submodule(case.path)
    for name, part in module.named_modules():
        if "config" in vars(part):
            part.config = before.get_submodule(name).config
    model.set_submodule(case.path, module)
    try:
        if case.rule == "compressed_attention":
            return in_parts(model, IDS, cache=DynamicCache(config=model.config))[0][0]
        return torch.cat(in_parts(model, IDS, 1)[0], 1)
    finally:
        model.set_submodule(case.path, before)


@pytest.mark.parametrize("change", ["forward", "attribute", "child"])
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.sweep) for case in MORE)], ids=str
)
def test_a_near_miss(case, change):
    """It gives what its own code gives, if anything runs in its place."""
    if (change == "attribute" and case.attribute is None) or (change == "child" and case.child is None):
        return
    own, model = models_of(case)
    plain = own.get_submodule(case.path)
    for is_first in (False, True):
        forget()
        twin, other = near(case, plain, change), copy.deepcopy(plain)
        done = {module: rewrite(module)[0] for module in ((twin, other) if is_first else (other, twin))}
        first = done[other][0].operator  # others are for some calls alone
        usual = usual_output(case)
        assert_close(by_operators(lambda: output(model, case, other), first), usual, 1e-4)  # noqa: B023
        if is_rewritten(twin):
            expected = output(own, case, near(case, plain, change))
            assert_close(output(model, case, twin), expected, 1e-4)
            assert (expected - usual).abs().max() > 1e-3 * expected.abs().max()


def test_a_norm_of_channels_first():
    """Behind one of channels that are last, of the same class and width."""
    last, first = (ConvNextLayerNorm(8, data_format=f"channels_{name}").eval() for name in ("last", "first"))
    x = torch.randn(1, 8, 3, 8)
    forget()
    with torch.no_grad():
        for norm in (last, first):
            for parameter in norm.parameters():
                parameter.copy_(torch.rand(8) + 0.5)
            expected = norm(x)
            done = [one.operator for one in rewrite(norm)[0]]
            assert done == (["layer_norm"] if norm is last else [])
            found = by_operators(lambda: norm(x), *done) if done else norm(x)  # noqa: B023
            torch.testing.assert_close(found, expected)


def layers_of_real_sizes() -> Iterator[tuple[str, nn.Module]]:
    """At the width of large models, but for matrices of linear layers, which a trial does not read."""
    yield "selective_scan_", JambaMambaMixer(JambaConfig(hidden_size=4096), 0)
    yield "_hyper_connection", DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=8192))
    yield "_index_topk", DeepseekV32Indexer(DeepseekV32Config(hidden_size=8192), 0)
    yield "rms_norm_gated", NemotronHMamba2Mixer(NemotronHConfig(), 0)


@pytest.mark.slow("trials of layers of real sizes")
def test_layers_of_real_sizes(monkeypatch):
    """Their sums round more than those of small ones. No program gets the random numbers of a trial."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("the generators of devices are set"))
    before = torch.get_rng_state()
    with torch.device("meta"):
        found = [*layers_of_real_sizes()]
    for operator, module in found:
        forget()
        (applied,) = filter(None, (rule(module.eval()) for rule in MODULE_RULES))
        assert operator in [done.operator for done in applied[1]], type(module).__name__
    assert torch.equal(torch.get_rng_state(), before)
