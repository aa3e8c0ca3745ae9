"""Whole layers of linear attention run by operators: against the model's own code."""

import copy

import pytest
import torch
from support import tiny_models
from support.launches import launches
from support.models import assert_close, eager, operators_of
from support.recognition import by_operators
from support.sweep import in_sweep
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_moe_mps
from torch_moe_mps.models.modules.rules import MODULE_RULES, recurrent_layers
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

CONV, SCAN, NORM = "causal_conv1d_update_", "_gated_delta_rule_", "rms_norm_gated"
SCANS = (SCAN, "selective_scan_")
# What makes a layer of an architecture linear, and the operators of a step of it.
FORMS = {
    "kimi_linear": ({}, (CONV, SCAN)),
    "bailing_hybrid": ({}, (CONV, SCAN)),
    "glm5_next": ({}, (CONV, SCAN)),
    "granitemoehybrid": ({}, (CONV, SCAN, NORM)),
    "nemotron_h": ({"layers_block_type": ["mamba", "attention"]}, (CONV, SCAN, NORM)),
    "minimax": ({"layer_types": ["full_attention", "linear_attention"]}, (SCAN, NORM)),
    "jamba": ({}, (CONV, "selective_scan_")),
    "mamba": ({}, (CONV, "selective_scan_")),
    "falcon_mamba": ({}, (CONV, "selective_scan_")),
}
BESIDE = {"minimax": {"position_embeddings": None, "attention_mask": None}}  # required arguments of a layer


def model_of(architecture: str, dtype: torch.dtype = torch.float32):
    make = tiny_models.other_model if architecture in tiny_models.other_causal() else tiny_models.tiny_model
    model = eager(make(architecture, **FORMS[architecture][0]))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", ".D", "norm.weight")):
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return model.to(dtype)


def layer_of(model) -> torch.nn.Module:
    rules = [
        rule
        for rule in MODULE_RULES
        if getattr(getattr(rule, "trial", None), "func", None) is recurrent_layers.matches_module
    ]
    return next(m for m in model.modules() if any(rule.may_be(m) for rule in rules))


def logits_of(model, mask: bool = False, pieces=(9, 1, 1, 3, 1)):
    """Of two rows in pieces, the first one padded on the left if there is a mask."""
    ids = torch.randint(3, 90, (2, sum(pieces)), generator=torch.Generator().manual_seed(1))
    whole, cache, found = torch.ones_like(ids), None, []
    whole[0, :4] = 0
    with torch.no_grad():
        for end, piece in zip(torch.tensor(pieces).cumsum(0).tolist(), ids.split(pieces, 1), strict=True):
            given = {"attention_mask": whole[:, :end]} if mask else {}
            out = model(input_ids=piece, **cache_argument(model, cache), use_cache=True, **given)
            cache, found = cache_among(out), [*found, out.logits]
    return torch.cat(found, 1)


OF_EACH_KIND = ["kimi_linear", "granitemoehybrid", "minimax", "jamba"]


@pytest.mark.parametrize("architecture", in_sweep(FORMS, OF_EACH_KIND))
def test_prompts_and_steps(architecture):
    """A prompt, steps and a few tokens at once, of padded rows too; what runs in a step.

    The own code takes all at once: behind a cache, that of Mamba-1 forgets states in front of several tokens,
    and takes the first columns of a mask.
    """
    model = model_of(architecture)
    expected = [logits_of(model, mask, (15,)) for mask in (False, True)]
    report = torch_moe_mps.accelerate(model)
    notes = {row.replaced_by for row in report.rows if any(n in str(row.replaced_by) for n in SCANS)}
    assert notes == {"; ".join(FORMS[architecture][1])}
    for own, mask in zip(expected, (False, True), strict=True):
        assert_close(logits_of(model, mask)[:, 4:], own[:, 4:], 1e-4)
    used = operators_of(lambda: logits_of(model))
    assert all(used[name] >= 5 for name in FORMS[architecture][1])
    torch_moe_mps.restore(model)
    assert not {*SCANS} & operators_of(lambda: logits_of(model)).keys()


@pytest.mark.parametrize("architecture", in_sweep(FORMS, ("kimi_linear", "minimax")))
def test_no_further_from_the_exact_result_than_the_own_code(architecture):
    """Layers in bfloat16: the median distance from a wide result, of the operators and of the own code."""
    model = model_of(architecture, torch.bfloat16)
    layer = layer_of(model)
    x = torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(1)).bfloat16()

    given = BESIDE.get(architecture, {})

    def run(module, x):
        with torch.no_grad():
            out = module(hidden_states=x, **given)
        return (out[0] if isinstance(out, tuple) else out).double()

    exact, own = run(copy.deepcopy(layer).double(), x.double()), run(layer, x)
    torch_moe_mps.accelerate(model)
    ours = by_operators(lambda: run(layer_of(model), x), *FORMS[architecture][1])
    error, own_error = ((y - exact).abs().median() for y in (ours, own))
    assert error <= 1.05 * own_error


def test_hooks_and_changes_run_the_own_code():
    model = model_of("kimi_linear")
    expected = logits_of(model)
    torch_moe_mps.accelerate(model)
    layer, seen = layer_of(model), []
    handle = layer.o_norm.register_forward_hook(lambda *_: seen.append("norm"))
    assert_close(logits_of(model), expected, 1e-4)
    assert len(seen) == 5
    handle.remove()
    assert SCAN in operators_of(lambda: logits_of(model))
    layer.o_norm.variance_epsilon = 0.5
    assert SCAN not in operators_of(lambda: logits_of(model))


@pytest.mark.parametrize("architecture", in_sweep(("jamba", "mamba", "falcon_mamba"), ("jamba",)))
def test_own_code_of_mamba_1_goes_on_by_single_tokens_where_it_has_to_run(architecture):
    """With a hook within, and in front of a backward; the model's own class forgets the state."""
    model = model_of(architecture)
    expected, forgotten = logits_of(model, pieces=(9, *[1] * 6)), logits_of(model)
    assert (forgotten - expected)[:, 11:14].abs().max() > 1e-2
    torch_moe_mps.accelerate(model)
    layer = layer_of(model)
    handle = layer.x_proj.register_forward_hook(lambda *_: None)
    assert_close(logits_of(model), expected, 1e-4)
    handle.remove()
    model.train()
    for module in model.modules():
        module.training = module is layer
    assert_close(logits_of(model), expected, 1e-4)


def test_a_layer_is_recognised_whatever_layer_it_registers_first():
    model = model_of("granitemoehybrid")
    layer = layer_of(model)
    assert layer.out_proj.in_features != layer.in_proj.in_features
    layer._modules = {"out_proj": layer.out_proj} | layer._modules
    expected = logits_of(model, pieces=(15,))
    report = torch_moe_mps.accelerate(model)
    assert any(SCAN in str(row.replaced_by) for row in report.rows)
    assert_close(by_operators(lambda: logits_of(model, pieces=(15,)), CONV, SCAN, NORM), expected, 1e-4)


def test_packed_sequences_are_refused_as_ever():
    model = model_of("kimi_linear")
    torch_moe_mps.accelerate(model)
    with torch.no_grad(), pytest.raises(ValueError, match="packed sequences"):
        layer_of(model)(torch.ones(1, 4, 32), cu_seqlens=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("architecture", in_sweep(FORMS, ("granitemoehybrid", "jamba")))
def test_launches_and_memory_of_prompts(simulated, architecture):
    """The launches of a layer do not grow with a prompt, and the tensors it makes grow as its length does."""
    model = model_of(architecture, torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    layer, counts, largest = layer_of(model), [], []
    for tokens in (20, 140):
        x = torch.ones(1, tokens, 32, dtype=torch.bfloat16, device="mps")
        with torch.no_grad(), LargestTensor() as mode:
            layer(hidden_states=x, **BESIDE.get(architecture, {}))
        largest.append(mode.elements)
        counts.append(launches(simulated, lambda: layer(hidden_states=x, **BESIDE.get(architecture, {}))))  # noqa: B023
    assert counts[0] == counts[1] and sum(counts[0].values()) <= 30, dict(counts[0])
    assert largest[1] <= 7 * largest[0]


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *(each.numel() for each in made)])
        return out
