"""DBRX: experts below each other in one matrix, and weights that are divided by their norm."""

import copy

import pytest
import torch
from support import families
from support.launches import captured_by_type, model_on_mps
from support.models import assert_close, eager, edit_forward, generate, output, prompt
from support.recognition import by_operators
from support.tiny_models import tiny_model

import torch_moe_mps

NAME = "dbrx"
FFN = {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2}
PRODUCTS = ("expert_mm", "moe_weighted_reduce")
ROUTED = (*PRODUCTS, "moe_router")


def of_kind(report, kind: str) -> list:
    return [row for row in report.rows if row.kind == kind]


@pytest.mark.parametrize(
    "changed",
    [{}, {"moe_normalize_expert_weights": None}, {"ffn_act_fn": {"name": "gelu"}, "moe_top_k": 3}],
    ids=["p is 1", "not divided", "gelu"],
)
def test_logits_and_tokens_are_those_of_eager_code(changed):
    own = eager(tiny_model(NAME, ffn_config=FFN | changed))
    model = copy.deepcopy(own)
    report = torch_moe_mps.accelerate(model)
    assert {"experts", "router"} <= {row.kind for row in report.replaced}
    assert all(row.done for kind in ("experts", "router") for row in of_kind(report, kind))
    assert_close(by_operators(lambda: output(model, prompt()), *ROUTED), output(own, prompt()), 1e-5)
    assert torch.equal(generate(model, prompt(), max_new_tokens=5), generate(own, prompt(), max_new_tokens=5))
    torch_moe_mps.restore(model)
    assert [*map(type, model.modules())] == [*map(type, own.modules())]
    assert torch.equal(output(model, prompt()), output(own, prompt()))


def test_another_norm_stays_the_models_own():
    own = eager(tiny_model(NAME, ffn_config=FFN | {"moe_normalize_expert_weights": 2.0}))
    model = copy.deepcopy(own)
    report = torch_moe_mps.accelerate(model)
    rows = of_kind(report, "router")
    assert {row.reason for row in rows} == {"it divides the weights by their norm of p = 2.0"}
    assert not any(row.done for row in rows)
    assert_close(by_operators(lambda: output(model, prompt()), *PRODUCTS), output(own, prompt()), 1e-5)


def test_another_product_stays_the_models_own():
    own = eager(tiny_model(NAME, n_layers=1))
    edit_forward(
        own.transformer.blocks[0].ffn.experts.mlp, "gate_proj * up_proj", "gate_proj * up_proj.abs()"
    )
    model = copy.deepcopy(own)
    report = torch_moe_mps.accelerate(model)
    assert not of_kind(report, "experts")
    assert_close(output(model, prompt()), output(own, prompt()), 1e-5)


@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    model = model_on_mps(NAME)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    families.check_types(families.of_layers(captured_by_type(simulated, model)), {"": 9})
