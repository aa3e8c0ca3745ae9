"""A router's matmul in float32."""

import torch
from support.launches import launches
from support.oracles_operators import checked
from support.values import numbers

from torch_moe_mps.ops.families.routing import router_logits


def check(x, weight, bias=None):
    assert checked("router_logits", x, weight, bias).dtype == torch.float32


def test_many_tokens(device):
    check(numbers(260, 96, dtype=torch.bfloat16).to(device), numbers(40, 96).to(device))


def test_a_prompt_runs_on_the_matmul_of_pytorch(simulated):
    x, weight = torch.ones(33, 8, device="mps"), torch.ones(3, 8, device="mps", dtype=torch.bfloat16)
    few, many = (launches(simulated, lambda: router_logits(rows, weight)) for rows in (x[:32], x))  # noqa: B023
    assert any(name.startswith("logits") for name in few)
    assert not any(name.startswith("logits") for name in many)


def test_no_columns(device):
    bias = torch.tensor([1.0, -2.0, 0.5], device=device)
    empty = router_logits(torch.zeros(2, 0, device=device), torch.zeros(3, 0, device=device), bias)
    assert torch.equal(empty.cpu(), torch.tensor([[1.0, -2.0, 0.5]]).expand(2, 3))


def test_nan_stays_in_its_token(device):
    x = numbers(3, 64).to(device)
    x[1, 7] = torch.nan
    result = router_logits(x, numbers(5, 64).to(device))
    assert result.isnan().sum() == 5 == result[1].isnan().sum()


def routers():
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3
    from transformers.models.dots1 import configuration_dots1, modeling_dots1
    from transformers.models.glm4_moe import configuration_glm4_moe, modeling_glm4_moe

    yield modeling_deepseek_v3.DeepseekV3TopkRouter, configuration_deepseek_v3.DeepseekV3Config
    yield modeling_dots1.Dots1TopkRouter, configuration_dots1.Dots1Config
    yield modeling_glm4_moe.Glm4MoeTopkRouter, configuration_glm4_moe.Glm4MoeConfig


def test_the_routers_of_models(device):
    """Their logits, bit for bit but for the order of the sum."""
    for router_class, config_class in routers():
        experts = {
            "n_routed_experts": 16,
            "num_local_experts": 16,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        }
        config = config_class(hidden_size=96, **experts)
        router = router_class(config)
        router.weight = torch.nn.Parameter(numbers(16, 96, dtype=torch.bfloat16), requires_grad=False)
        x = numbers(4, 96, dtype=torch.bfloat16)
        model = router(x)
        logits = model[0] if isinstance(model, tuple) else model
        assert logits.dtype == torch.float32
        ours = router_logits(x.to(device), router.weight.to(device)).cpu()
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
