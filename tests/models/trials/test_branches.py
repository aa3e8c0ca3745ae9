"""A trial counts only where each branch of eager code had all of its outcomes: near misses that differ behind
a bound, by their layer's index, by a buffer, or by a function that they call."""

import functools

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, output, prompt
from torch import nn
from transformers.models.bamba import modeling_bamba
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next import modeling_qwen3_next

import torch_moe_mps
from torch_moe_mps.models.basics.state import Unsupported
from torch_moe_mps.models.trials.branches import Branches
from torch_moe_mps.models.trials.draws import eager as recorded
from torch_moe_mps.models.trials.draws import in_each_draw, normal

SCAN, ROPE = "_gated_delta_rule_", "rope"


def bamba(**changed):
    """Layers of Mamba-2 in front of attention and behind it."""
    return eager(tiny_models.tiny_model("bamba", num_hidden_layers=3, attn_layer_indices=[1], **changed))


def accelerated(model):
    """A report, of a model whose logits stay those of its eager code."""
    ids = prompt()
    expected = output(model, ids)
    report = torch_moe_mps.accelerate(model)
    assert_close(output(model, ids), expected, 1e-4)
    return report


def patched(monkeypatch, owner, name, change):
    """Puts change(what was there) in the place of an attribute."""
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(own)(change(own)))


def test_an_upper_limit_of_time_steps():
    """Of the config alone, which no step of a small model reaches by itself."""
    model = eager(tiny_models.tiny_model("granitemoehybrid", time_step_limit=(0.0, 8.0)))
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data += 12.0
    assert SCAN not in accelerated(model).operators()
    assert SCAN in accelerated(eager(tiny_models.tiny_model("granitemoehybrid"))).operators()


def test_a_factor_of_the_layer_index(monkeypatch):
    def scaled(own):
        return lambda self, *args, **options: own(self, *args, **options) / (1 + self.layer_idx)

    patched(monkeypatch, modeling_bamba.BambaMixer, "forward", scaled)
    assert SCAN not in accelerated(bamba()).operators()


def test_a_layer_index_that_only_one_layer_has(monkeypatch):
    def scaled(own):
        def forward(self, *args, **options):
            return own(self, *args, **options) * (2.0 if self.layer_idx == 4 else 1.0)

        return forward

    patched(monkeypatch, modeling_bamba.BambaMixer, "forward", scaled)
    model = eager(tiny_models.tiny_model("bamba", num_hidden_layers=5, attn_layer_indices=[1]))
    rows = {row.name: row.replaced_by for row in accelerated(model).rows}
    assert SCAN in rows["model.layers.2.mamba"] and SCAN not in rows["model.layers.4.mamba"]


def test_a_buffer_that_only_eager_code_reads(monkeypatch):
    def scaled(own):
        return lambda self, *args, **options: own(self, *args, **options) * self.layer_scale

    patched(monkeypatch, modeling_bamba.BambaMixer, "forward", scaled)
    model = bamba()
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer, "mamba"):
            layer.mamba.register_buffer("layer_scale", torch.tensor(1.0 / (1 + number)))
    assert SCAN not in accelerated(model).operators()


def test_a_delta_rule_whose_decay_has_a_floor(monkeypatch):
    def floored(own):
        return lambda *args, g, **options: own(*args, g=g.clamp(min=-5.0), **options)

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        patched(monkeypatch, modeling_qwen3_next, name, floored)
    assert SCAN not in accelerated(eager(tiny_models.tiny_model("qwen3_next"))).operators()


@pytest.mark.parametrize("bound", [0.01, 40.0])
def test_a_rotation_with_a_bound(monkeypatch, bound):
    def clamped(own):
        return lambda q, k, *args, **options: own(q.clamp(-bound, bound), k, *args, **options)

    patched(monkeypatch, modeling_llama, "apply_rotary_pos_emb", clamped)
    assert ROPE not in accelerated(eager(tiny_models.tiny_model("llama"))).operators()


FUNCTIONS = {
    "rotate_half": (modeling_llama, "llama", ROPE, lambda own: lambda x: 2.0 * own(x)),
    "l2norm": (modeling_qwen3_next, "qwen3_next", SCAN, lambda own: lambda x, *a, **k: 2.0 * own(x, *a, **k)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_replaced_once_a_model_was_accelerated(monkeypatch, name):
    file, architecture, operator, change = FUNCTIONS[name]
    assert operator in accelerated(eager(tiny_models.tiny_model(architecture))).operators()
    with monkeypatch.context() as patch:
        patched(patch, file, name, change)
        assert operator not in accelerated(eager(tiny_models.tiny_model(architecture))).operators()
    assert operator in accelerated(eager(tiny_models.tiny_model(architecture))).operators()


def test_the_report_names_a_bound_that_no_trial_reached(monkeypatch):
    def clamped(own):
        def forward(self, hidden_states, *args, **options):
            return (
                own(self, hidden_states, *args, **options) + (hidden_states.tanh() - 2.0).clamp(max=1.0) * 0
            )

        return forward

    patched(monkeypatch, modeling_bamba.BambaMixer, "forward", clamped)
    (line,) = (line for line in str(accelerated(bamba())).splitlines() if " BambaMixer " in line)
    assert "the rest is left alone: clamp in test_branches.py:" in line and "was never above 1" in line


X = torch.tensor([-1.0, 2.0])
BRANCHES = {
    "clamp": (lambda x: x.clamp(-3.0, 1.0), ["below -3"]),
    "clamp_": (lambda x: x.clone().clamp_(max=5.0), ["above 5"]),
    "comparison": (lambda x: (x < 4.0) * x, ["false"]),
    "where": (lambda x: torch.where(x > -2.0, x, 0.0), ["false", "false"]),
    "maximum": (lambda x: torch.maximum(x, torch.full_like(x, -7.0)), ["the second"]),
    "max": (lambda x: torch.max(x, x + 1.0), ["the first"]),
    "abs": (lambda x: (x + 9.0).abs(), ["below 0"]),
    "relu": (lambda x: nn.functional.relu(x - 9.0), ["above 0"]),
    "relu6": (nn.functional.relu6, ["above 6"]),
    "masked_fill": (lambda x: x.masked_fill(x != x, 0.0), ["true", "true"]),
    "python": (lambda x: x if (x < 9.0).all() else -x, ["false", "false"]),
    "reached": (lambda x: x.clamp(max=0.5).abs(), []),
    "touched": (lambda x: nn.functional.softplus(200.0 * x).clamp(min=0.0), []),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_outcomes_that_did_not_happen(name):
    function, missing = BRANCHES[name]
    branches = Branches()
    branches.run(function, X)
    assert [outcome for _, outcome in branches.unreached()] == missing


def test_calls_of_one_function_are_branches_of_their_own():
    def limit(x):
        return x.clamp(max=1.0)

    branches = Branches()
    branches.run(lambda x: limit(x) + limit(0.1 * x), X)
    assert len(branches.seen) == 2 and [outcome for _, outcome in branches.unreached()] == ["above 1"]


@pytest.mark.parametrize("bound", [1e-3, 0.5, 7.0, 90.0, 3000.0])
def test_bounds_are_found(bound):
    """Magnitudes of the draws pass a bound, whose own value tells where it lies."""

    def compare(function):
        x = normal(4, 8)
        return torch.equal(recorded(function)(x), x)

    def limited(x):
        return torch.where(x.abs() > bound, -x, x)

    compared = in_each_draw(compare)
    assert compared(lambda x: x) and not compared(limited)


def test_a_bound_that_no_draw_reaches_is_an_error():
    with pytest.raises(Unsupported, match=r"clamp in test_branches.py:.* was never above 2"):
        in_each_draw(lambda: recorded(lambda x: x.tanh().clamp(max=2.0))(normal(3)) is not None)()
