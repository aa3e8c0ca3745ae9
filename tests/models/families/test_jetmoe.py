"""JetMoE: experts of the MLP and of attention's projections, behind a router that groups rows by expert."""

import copy

import pytest
import torch
from support import families
from support.capturing import accelerated, answer, without_capture
from support.graphs import assert_left, assert_needed, passes_of
from support.models import assert_close, edit_forward, operators_of, output, prompt, tiny
from support.values import numbers as random
from torch import Tensor

import torch_moe_mps
from torch_moe_mps.models.attention.attention import NAME as ATTENTION
from torch_moe_mps.models.capture.classes import captures_of

NAME = "jetmoe"
OPERATORS = {"moe_router": 4, "expert_mm": 4, "moe_weighted_reduce": 2, "_moe_experts": 2}


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@torch.no_grad()
def test_restored_the_model_runs_its_own_code():
    model, ids = tiny(NAME), prompt()
    classes = [type(module) for module in model.modules()]
    report = torch_moe_mps.accelerate(model)
    assert {row.cls for row in report.rows if row.kind == "experts" and row.done} == {
        "JetMoeMoA",
        "JetMoeMoE",
    }
    assert operators_of(lambda: model(ids)).items() >= OPERATORS.items()
    twin = copy.deepcopy(model)
    assert operators_of(lambda: twin(ids)).items() >= OPERATORS.items()
    torch_moe_mps.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert not operators_of(lambda: model(ids))
    assert torch.equal(output(model, ids), output(tiny(NAME), ids))


def test_gradients_of_attention_alone():
    """The own code reduces what an operator has mapped, where a gradient is needed of the keys."""
    own, model, _ = families.accelerated(NAME)
    for each in (own, model):
        each.requires_grad_(False)
        each.model.layers[0].self_attention.kv_proj.weight.requires_grad_(True)
        each(prompt()).logits.square().mean().backward()
    gradients = [each.model.layers[0].self_attention.kv_proj.weight.grad for each in (model, own)]
    assert gradients[1].abs().max() > 0
    assert_close(*gradients, 1e-5)


@pytest.mark.parametrize("block", ["mlp", "self_attention.experts"])
def test_a_router_of_another_formula_is_left_alone(block):
    model = tiny(NAME)
    router = model.get_submodule(f"model.layers.0.{block}.router")
    edit_forward(router, "torch.softmax(top_k_logits, dim=1)", "torch.sigmoid(top_k_logits)")
    with pytest.warns(UserWarning, match="JetMoeParallelExperts is left alone: its class does not follow"):
        report = torch_moe_mps.accelerate(model)
    assert {row.name.rpartition(".")[0] for row in report.left_alone} == {f"model.layers.0.{block}"}
    assert sum(row.kind == "experts" for row in report.replaced) == 3


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    families.check_launches(simulated, NAME, {"": 12})


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("bits", [None, 4])
@torch.no_grad()
def test_captured_tokens(bits):
    model = accelerated(NAME, "cpu", **({} if bits is None else {"bits": bits, "group_size": 32}))
    own = tiny(NAME) if bits is None else without_capture(copy.deepcopy(model))
    for each in (model, own) if bits else (model,):
        each.set_attn_implementation(ATTENTION)
    assert_close(answer(model, "cpu"), answer(own, "cpu"), 2e-5)
    assert captures_of(model).reason is None, captures_of(model).reason
    assert captures_of(model).programs


# Attention of one token to keys whose heads are repeated.
ops, KEYS, WIDTH = torch.ops.moe_mps, 9, 16
# Of two rows, which see other keys; the second does not see the last.
SEEN = torch.tensor([[0, KEYS], [2, KEYS - 1]], dtype=torch.int32)
MASK = torch.tensor([[True, False, True], [True, True, False]]).repeat(1, 3)[:, None, None]
MASK_OF_HEADS = MASK.repeat(1, 6, 1, 1) & (torch.arange(6) != torch.arange(KEYS)[:, None]).T[:, None]
SINKS = random(6)


def repeated(cache: Tensor, count: int = 3) -> Tensor:
    return cache.repeat(1, count, 1, 1)


def repeats(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25)


def repeats_of_some_keys(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, key_range=SEEN, softcap=5.0)


def repeats_of_masked_keys(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, attn_mask=MASK)


def repeats_of_keys_that_a_head_sees(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, attn_mask=MASK_OF_HEADS)


def repeats_of_each_head(q, keys, values):
    keys, values = (cache.repeat_interleave(3, 1) for cache in (keys, values))
    return ops.cached_attention(q, keys, values, scale=0.25)


def repeats_in_other_counts(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values[:, :1], 6), scale=0.25)


def repeats_of_tokens(q, keys, values):
    keys, values = (cache.repeat(1, 3, 2, 1) for cache in (keys, values))
    return ops.cached_attention(q, keys, values, scale=0.25)


def repeats_of_a_window(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, window=4)


def repeats_beside_sinks(q, keys, values):
    return ops.cached_attention(q, repeated(keys), repeated(values), scale=0.25, sinks=SINKS)


def repeats_before_a_write(q, keys, values):
    several = repeated(keys)
    keys[:, :, -1].fill_(1.0)
    return ops.cached_attention(q, several, repeated(values), scale=0.25)


def repeats_in_another_shape(q, keys, values):
    keys, values = (cache.repeat(1, 3, 1, 1).view(2, 6, KEYS, WIDTH) for cache in (keys, values))
    return ops.cached_attention(
        q, keys.view(2, 3, 2 * KEYS, WIDTH), values.view(2, 3, 2 * KEYS, WIDTH), scale=0.25
    )


ONE, REPEATED = {"cached_attention": 1}, {"cached_attention": 1, "repeat": 2}
OF_REPEATS = {
    repeats: ONE,
    repeats_of_some_keys: ONE,
    repeats_of_masked_keys: ONE,
    repeats_of_keys_that_a_head_sees: REPEATED,
    repeats_of_each_head: ONE | {"clone": 2},
    repeats_in_other_counts: REPEATED,
    repeats_of_tokens: REPEATED,
    repeats_of_a_window: REPEATED,
    repeats_beside_sinks: REPEATED,
    repeats_before_a_write: REPEATED | {"fill_": 1},
    repeats_in_another_shape: REPEATED,
}


@pytest.mark.parametrize("function", OF_REPEATS, ids=lambda function: function.__name__)
def test_repeated_keys(function):
    caches = [random(2, 2, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    assert_left(OF_REPEATS[function], function, random(2, 6, 1, WIDTH), *caches, tolerance=2e-6)


def test_repeated_keys_of_two_tokens():
    caches = [random(2, 2, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    assert_left(REPEATED, repeats, random(2, 6, 2, WIDTH), *caches)


@pytest.mark.parametrize("left_out", passes_of(NAME), ids=lambda each: each.__name__)
def test_its_pass_is_needed(left_out):
    caches = [random(2, 2, KEYS, WIDTH, seed=seed) for seed in (3, 4)]
    cases = [(function, (random(2, 6, 1, WIDTH), *caches), left) for function, left in OF_REPEATS.items()]
    assert_needed(left_out, cases)
