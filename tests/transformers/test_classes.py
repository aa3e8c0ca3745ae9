"""Every class with experts on its own, and single routers, against the model's own code."""

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of

import torch_moe_mps

transformers.logging.set_verbosity_error()


def test_all_classes_are_found():
    """As many as the decorator's uses in the modelling files."""
    assert len(tiny_models.experts_classes()) == tiny_models.count_decorators()


def inputs(module, dtype: torch.dtype, tokens: int = 11, slots: int = 3):
    generator = torch.Generator().manual_seed(3)
    width = (module.gate_up_proj if module.has_gate else module.up_proj).shape[
        1 if module.is_transposed else 2
    ]
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    ids = torch.rand(tokens, module.num_experts, generator=generator).argsort(-1)[:, :slots]
    weights = torch.rand(tokens, slots, generator=generator).to(dtype)
    return x, ids, weights


@pytest.mark.parametrize("name", sorted(tiny_models.experts_classes()))
def test_experts_alone(name):
    module = tiny_models.experts_module(name)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        module.to(dtype)
        module.config._experts_implementation = "eager"
        arguments = inputs(module, dtype)
        with torch.no_grad():
            expected = module(*arguments)
            module.config._experts_implementation = "moe_mps"
            operators = operators_of(lambda: module(*arguments))  # noqa: B023
            assert "moe_experts" in operators or "expert_mm" in operators
            assert_close(module(*arguments), expected, tolerance)


def test_experts_outside_of_the_chosen_groups():
    """They count as 0.0 in this architecture, which is more than a negative choice within the groups."""
    model = eager(tiny_models.tiny_model("axk2"))
    router = next(module for module in model.modules() if hasattr(module, "e_score_correction_bias"))
    router.e_score_correction_bias.fill_(-2.0)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = router(x)[2]
        torch_moe_mps.accelerate(model)
        assert operators_of(lambda: router(x)) == {"moe_router": 1}
        ids = router(x)[2]
    group_size = router.num_experts // router.num_group
    assert torch.equal(ids // group_size, expected // group_size)  # which of the equal ones is open


@pytest.mark.parametrize("architecture", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"])
def test_dtypes_of_routers(architecture):
    model = eager(tiny_models.tiny_model(architecture, torch.bfloat16))
    replaced = [row for row in torch_moe_mps.accelerate(model).replaced if row.kind == "router"]
    router = model.get_submodule(replaced[0].name)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        dtypes = [result.dtype for result in router(x)]
        torch_moe_mps.restore(model)
        assert dtypes == [result.dtype for result in router(x)]
