"""JetMoE: experts of the MLP and of attention's projections, behind a router that groups rows by expert."""

import copy

import pytest
import torch
from support import families
from support.capturing import accelerated, answer, without_capture
from support.models import assert_close, edit_forward, operators_of, output, prompt, tiny

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
