"""Every class with experts, and every router, on its own against the model's own code."""

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of, output, prompt

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(tiny_models.experts_classes()))
def test_experts_alone(name, dtype):
    module = tiny_models.experts_module(name, dtype)
    module.config._experts_implementation = "eager"
    arguments = inputs(module, dtype)
    with torch.no_grad():
        expected = module(*arguments)
        module.config._experts_implementation = "moe_mps"
        operators = operators_of(lambda: module(*arguments))
        assert "moe_experts" in operators or "expert_mm" in operators
        assert_close(module(*arguments), expected, 1e-5 if dtype == torch.float32 else 2e-2)


def calls_of(model, names: list[str]) -> dict[str, tuple]:
    """The arguments with which the model calls each of its routers."""
    calls = {}

    def record(module, args, kwargs):
        calls[module] = (args, kwargs)

    modules = {name: model.get_submodule(name) for name in names}
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules.values()]
    output(model, prompt(4, 16))
    for hook in hooks:
        hook.remove()
    some = next(iter(calls.values()), None)  # a router for images is not called by a prompt of text
    return {name: calls.get(module, some) for name, module in modules.items()}


def decided(router, args: tuple, kwargs: dict, ids: torch.Tensor) -> torch.Tensor:
    """Tokens whose chosen experts do not change when the hidden states change by 1e-5."""
    hidden, *others = args
    kept = torch.ones(ids.shape[0], dtype=torch.bool)
    for seed in range(4):
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
        moved = router(hidden * (1 + 1e-5 * noise), *others, **kwargs)[2]
        kept &= (moved.sort(-1).values == ids.sort(-1).values).all(-1)
    return kept


@pytest.mark.parametrize("architecture", tiny_models.architectures())
def test_routers(architecture):
    """The same experts and weights for the same hidden states; near ties are excluded by construction."""
    own, model = eager(tiny_models.tiny_model(architecture)), eager(tiny_models.tiny_model(architecture))
    replaced = [row for row in torch_moe_mps.accelerate(model).replaced if row.kind == "router"]
    names = [row.name for row in replaced if row.replaced_by.startswith("moe_router")]
    with torch.no_grad():
        for name, (args, kwargs) in calls_of(own, names).items():
            router = own.get_submodule(name)
            expected = router(*args, **kwargs)
            rows = decided(router, args, kwargs, expected[2])
            logits, weights, ids = model.get_submodule(name)(*args, **kwargs)[:3]
            assert rows.float().mean() > 0.8
            assert torch.equal(logits, expected[0])
            assert (ids.dtype, weights.dtype) == (expected[2].dtype, expected[1].dtype)
            order, own_order = ids.argsort(-1), expected[2].argsort(-1)
            assert torch.equal(ids.gather(1, order)[rows], expected[2].gather(1, own_order)[rows])
            assert_close(weights.gather(1, order)[rows], expected[1].gather(1, own_order)[rows], 1e-6)


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
