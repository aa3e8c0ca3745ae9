"""Linear attention by the gated delta rule, prompts and steps: the operators against the model's own code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models
from support.gated_delta_rule import decoded, layer_of, model_of, step
from support.launches import launches
from support.models import assert_close, eager, operators_of, prompt
from support.recognition import by_operators
from support.sweep import in_sweep
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.basics.state import EMPTY_STATE, STATE
from torch_moe_mps.models.basics.tensors import notes_on
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.modules.rules import gated_delta_rule as rules
from torch_moe_mps.models.modules.rules.norms import NormCall, rewrite_norm
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument
from torch_moe_mps.transformers.install import rewrite

ARCHITECTURES = ("qwen3_next", "qwen3_5_moe")
STEP = {"causal_conv1d_update_": 1, "_gated_delta_rule_": 1, "rms_norm_gated": 1}


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("qwen3_5_moe",)))
def test_step_by_step(architecture):
    """Logits and states of the cache over several steps, and the operators of a step and of a prompt."""
    model = model_of(architecture)
    expected, states = decoded(model)
    torch_moe_mps.accelerate(model)
    results = []
    used = operators_of(lambda: results.append(decoded(model)))
    assert used["_gated_delta_rule_"] == used["causal_conv1d_update_"] == 5  # the prompt, too
    ((result, ours),) = results
    assert_close(result, expected, 1e-5)
    assert_close(ours, states, 1e-5)
    assert operators_of(step(model)) == STEP
    with torch.no_grad():
        layer, x = layer_of(model), torch.ones(1, 9, 32)
        assert operators_of(lambda: layer(x)) == STEP


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("qwen3_next",)))
def test_prompts_in_pieces(architecture):
    """A prompt of more than one of the model's chunks, whole and cut in two: logits and states."""
    model = model_of(architecture)
    ids = torch.arange(70).remainder(model.config.vocab_size)[None]

    def run(*pieces):
        cache, logits = None, []
        with torch.no_grad():
            for piece in pieces:
                out = model(input_ids=piece, **cache_argument(model, cache), use_cache=True)
                cache, logits = cache_among(out), [*logits, out.logits]
        layer = cache.layers[0]
        return torch.cat(logits, 1), layer.conv_states[0], layer.recurrent_states[0]

    expected = run(ids)
    torch_moe_mps.accelerate(model)
    for cut in (70, 3, 64):
        pieces = [each for each in ids.split([cut, 70 - cut], 1) if each.numel()]
        found = by_operators(lambda: run(*pieces), *STEP)  # noqa: B023
        for actual, own in zip(found, expected, strict=True):
            assert_close(actual, own, 1e-5)


def test_a_prompt_on_mps(simulated):
    """The launches of a layer do not grow with the prompt."""
    model = model_of("qwen3_5_moe", torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    layer = layer_of(model)
    counts = []
    for tokens in (20, 140):
        x = torch.ones(1, tokens, 32, dtype=torch.bfloat16, device="mps")
        with torch.no_grad():
            counts.append(launches(simulated, lambda: layer(x)))  # noqa: B023
    assert counts[0] == counts[1] and sum(counts[0].values()) <= 30, dict(counts[0])


CONV_WITH_KEYWORDS = ("kimi_linear", "bailing_hybrid", "granitemoehybrid", "jamba", "glm5_next", "nemotron_h")
MAMBA = {"nemotron_h": {"layers_block_type": ["mamba", "attention"]}}


@pytest.mark.parametrize("architecture", in_sweep(CONV_WITH_KEYWORDS, ("bailing_hybrid",)))
def test_a_convolution_called_with_keywords(architecture):
    model = eager(tiny_models.tiny_model(architecture, **MAMBA.get(architecture, {})))
    expected, _ = decoded(model, 2)
    torch_moe_mps.accelerate(model)
    results = []
    assert operators_of(lambda: results.append(decoded(model, 2)))["causal_conv1d_update_"] >= 2
    assert_close(results[0][0], expected, 1e-4)


@pytest.mark.parametrize(
    "architecture,joined",
    [
        ("qwen3_next", ["in_proj_qkvz", "in_proj_ba"]),
        ("qwen3_5_moe", ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]),
        ("qwen3_5_moe", ["in_proj_qkv", "in_proj_z"]),
    ],
)
def test_projections_of_one_input_run_together(architecture, joined, monkeypatch):
    """Of captured tokens of one sequence, also where they have 4 outputs each. Those that stay dense do not
    keep the others apart. Logits are those of the rounded weights."""
    monkeypatch.setenv(CAPTURE, "1")
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(dense)
    keep = {name for name, _ in layer_of(model).named_children() if "in_proj" in name} - {*joined}
    torch_moe_mps.accelerate(model, bits=4, group_size=32, keep=[f"*.{name}" for name in keep])
    twin = tiny_models.dense_twin(dense, model)
    torch.testing.assert_close(decoded(model, batch=1)[0], decoded(twin, batch=1)[0], rtol=1e-4, atol=1e-4)
    memories = {getattr(layer_of(model), name).packed.untyped_storage().data_ptr() for name in joined}
    assert captures_of(model).programs and len(memories) == 1


def test_as_exact_in_16_bit():
    """The step's distance from float32, the operators' and the model's own, from one state of the cache."""
    model = model_of(dtype=torch.bfloat16)
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        cache = cache_among(model(input_ids=prompt(16), use_cache=True))
        layer, narrow, wide = layer_of(model), copy.deepcopy(cache), copy.deepcopy(cache)
        wide.layers[0].conv_states[0] = cache.layers[0].conv_states[0].float()
        correct = copy.deepcopy(layer).float()(x.float(), **cache_argument(layer, wide))
        own = layer(x, **cache_argument(layer, narrow))
        torch_moe_mps.accelerate(model)
        ours = by_operators(lambda: layer(x, **cache_argument(layer, cache)), *STEP)
    assert ours.dtype == torch.bfloat16
    error, own_error = ((y.float() - correct).square().mean() for y in (ours, own))
    assert error <= own_error


def test_a_layer_in_training():
    """It runs its own code, but for its norm."""
    model = model_of()
    expected, _ = decoded(model)
    torch_moe_mps.accelerate(model)
    layer_of(model).train()
    layer_of(model).norm.eval()
    assert operators_of(step(model)) == {"rms_norm_gated": 1}
    assert_close(decoded(model)[0], expected, 1e-5)


def test_arguments_that_the_operator_does_not_know():
    """Bounds of packed sequences and the like go to the model's own function."""
    q, k, v, g, beta, state = (
        torch.rand(1, 1, *shape) for shape in ((2, 8), (2, 8), (2, 4), (2,), (2,), (2, 8, 4))
    )
    state, given = state[0], []

    def function(*args, **options):
        given.append(options)
        return args[2], state

    options = {"initial_state": state, "output_final_state": True, "use_cache": True}
    for others, own in (
        ({"cu_seqlens": None}, 0),
        ({"cu_seqlens": torch.tensor([0, 1])}, 1),
        ({"mode": "a"}, 2),
    ):
        rules.delta_rule(function, q, k, v, g=g, beta=beta, **options, **others)
        assert len(given) == own
    assert given[-1] == {"g": g, "beta": beta, **options, "mode": "a"}


@pytest.mark.parametrize(
    "function", [qwen3_next.torch_recurrent_gated_delta_rule, qwen3_next.torch_chunk_gated_delta_rule]
)
def test_a_given_state_stays_as_it_is(function):
    """Only the cache that takes the new one changes it."""
    q, k, v, state = (torch.rand(1, *shape) for shape in ((3, 2, 8), (3, 2, 8), (3, 2, 4), (2, 8, 4)))
    gates = {"g": -torch.rand(1, 3, 2), "beta": torch.rand(1, 3, 2)}
    options = {"initial_state": state, "output_final_state": True} | gates
    before, expected = state.clone(), function(q, k, v, **options)
    results = []
    assert operators_of(lambda: results.extend(rules.delta_rule(function, q, k, v, **options))) == {
        "_gated_delta_rule_": 1
    }
    assert torch.equal(state, before)
    assert_close(results, expected, 1e-5)


def test_a_state_of_another_dtype():
    """It is not what the operator takes: the model's own function runs."""
    model = model_of()
    results = []
    for accelerated in (False, True):
        if accelerated:
            torch_moe_mps.accelerate(model)
        with torch.no_grad():
            cache = cache_among(model(input_ids=prompt(), use_cache=True))
            layer = cache.layers[0]
            layer.recurrent_states[0] = layer.recurrent_states[0].bfloat16()
            logits = []
            token = {"input_ids": torch.full((2, 1), 5), **cache_argument(model, cache), "use_cache": True}
            used = operators_of(lambda: logits.append(model(**token).logits))  # noqa: B023
        assert "_gated_delta_rule_" not in used and layer.recurrent_states[0].dtype == torch.bfloat16
        assert used.get("causal_conv1d_update_", 0) == accelerated
        results += logits
    assert_close(results[1], results[0], 1e-4)


def test_an_activation_that_changes():
    """The norm's form was found with the old one: its own code runs from then on."""
    model = model_of()
    torch_moe_mps.accelerate(model)
    norm = layer_of(model).norm
    x, z = torch.ones(2, 8), torch.ones(2, 8)
    norm.weight.data = torch.ones(8)
    with torch.no_grad():
        torch.testing.assert_close(by_operators(lambda: norm(x, z), "rms_norm_gated"), F.silu(z))
        norm.activation = "gelu"
        assert operators_of(lambda: norm(x, z)) == {}
        torch.testing.assert_close(norm(x, z), F.gelu(z))


# What functions compute


def test_functions_are_told_apart_by_what_they_compute():
    conv, rule = qwen3_next.causal_conv1d_update, qwen3_next.torch_recurrent_gated_delta_rule
    chunks = qwen3_next.torch_chunk_gated_delta_rule

    def other_conv(x, state, weight, bias=None, activation=None):
        return conv(x, state, weight.flip(-1), bias, activation)

    whole = qwen3_next.causal_conv1d_fn

    def later_conv(x, *rest, **options):
        return whole(x, *rest, **options).roll(1, -1)

    def without_update(x, state, *rest):
        return conv(x, state.clone(), *rest)

    def other_scale(q, k, v, **options):
        out, state = rule(q, k, v, **options)
        return 2.0 * out, state

    def other_decay(q, k, v, g, **options):
        return rule(q, k, v, g=2.0 * g, **options)

    def chunks_that_forget(*args, initial_state, **options):
        return chunks(*args, initial_state=None, **options)

    assert rules.is_conv_of_prompt(whole)
    assert not any(map(rules.is_conv_of_prompt, (later_conv, conv, rule, len)))
    assert rules.is_causal_conv(conv) and all(map(rules.is_delta_rule, (rule, chunks)))
    assert not any(map(rules.is_causal_conv, (other_conv, without_update, rule, len)))
    assert not any(map(rules.is_delta_rule, (other_scale, other_decay, chunks_that_forget, conv, len)))


class OneNorm(qwen3_next.Qwen3NextRMSNormGated):
    """Zero-centred."""

    def forward(self, x, gate):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1.0 + self.weight) * F.silu(gate.float())).to(x.dtype)


class GateFirst(qwen3_next.Qwen3NextRMSNormGated):
    def forward(self, x, gate):
        y = x.float() * F.silu(gate.float())
        return (self.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class SigmoidGate(qwen3_next.Qwen3NextRMSNormGated):
    def forward(self, x, gate):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * self.weight * gate.float().sigmoid()).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "offset"),
    [(qwen3_next.Qwen3NextRMSNormGated, 0.0), (OneNorm, 1.0), (GateFirst, None), (SigmoidGate, None)],
)
def test_norms_are_told_apart_by_what_they_compute(norm, offset):
    module = norm(16)
    found = rewrite_norm(module)
    assert (found is None) == (offset is None)
    numbers = {"norm_eps": 1e-6, "norm_weight_offset": offset}
    names = ("hidden_states", "gate") if norm is qwen3_next.Qwen3NextRMSNormGated else ("x", "gate")
    expected = None if offset is None else NormCall("rms_norm_gated", names, ("weight",), (), numbers, True)
    assert module.__dict__.get(STATE, EMPTY_STATE).formula == expected
    assert torch.equal(module.weight, torch.ones(16))


def test_a_gated_norm_is_called_as_its_own_forward():
    """By names in any order; without what it needs, and with shapes that spread, its own code runs."""
    norm = qwen3_next.Qwen3NextRMSNormGated(16).eval().requires_grad_(False)
    x, gate = torch.randn(2, 2, 3, 16, generator=torch.Generator().manual_seed(0)).unbind()
    assert rewrite(norm)[0]
    wide, factor = x.double(), gate.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    expected = (normed * factor * torch.sigmoid(factor)).float()
    calls = {"names": lambda: norm(gate=gate, hidden_states=x), "both": lambda: norm(x, gate=gate)}
    for name, call in calls.items():
        assert operators_of(call) == {"rms_norm_gated": 1}, name
        torch.testing.assert_close(call(), expected)
    torch.testing.assert_close(norm(x, gate[:1, :1]), norm(x, gate[:1, :1].expand_as(x)))
    assert operators_of(lambda: norm(x, gate[:1, :1])) == {}
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        norm(x, other=gate)


NEED = "must get what the operator takes while its state has uncommitted draft tokens, got "
WAY_OUT = r'.*: generate without draft tokens \(speculative=None, "--speculative none"\)$'


def test_uncommitted_tokens_that_only_eager_code_could_read():
    """The error names the function, what it got, and how to go on."""
    state = torch.zeros(1, 2, 4, 3)
    notes_on(state).uncommitted = torch.zeros(1, 2, 8, 10), torch.zeros(1, 1, dtype=torch.int32)
    wide = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    options = {"g": wide[..., 0], "beta": wide[..., 0], "initial_state": state}
    recurrent = qwen3_next.torch_recurrent_gated_delta_rule
    with pytest.raises(
        RuntimeError, match=rf"{recurrent.__name__} {NEED}float64 \[1, 1, 2, 4\] on cpu{WAY_OUT}"
    ):
        rules.delta_rule(recurrent, wide, wide, wide[..., :3], **options)
    positions = torch.zeros(1, 6, 4)
    notes_on(positions).uncommitted = torch.zeros(1, 6, 8), torch.zeros(1, 1, dtype=torch.int32)
    x, weight, conv = torch.zeros(1, 6, 1), torch.zeros(6, 4), qwen3_next.causal_conv1d_update
    with pytest.raises(RuntimeError, match=rf"{conv.__name__} {NEED}float32 \[1, 6, 1\] on cpu{WAY_OUT}"):
        rules.causal_conv(conv, x, positions, weight, None, "gelu")
