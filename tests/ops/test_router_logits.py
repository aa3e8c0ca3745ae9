"""A router's matmul in float32."""

import torch
from support.oracles_operators import checked
from support.values import numbers

from torch_moe_mps.ops.families.routing import router_logits


def check(x, weight, bias=None):
    assert checked("router_logits", x, weight, bias).dtype == torch.float32


def test_many_tokens(device):
    check(numbers(260, 96, dtype=torch.bfloat16).to(device), numbers(40, 96).to(device))


def test_a_prompt_runs_on_the_matmul_of_pytorch(simulated):
    x, weight = torch.ones(33, 8, device="mps"), torch.ones(3, 8, device="mps", dtype=torch.bfloat16)
    for rows, is_ours in ((x[:32], True), (x, False)):
        with simulated.trace() as commands:
            router_logits(rows, weight)
        assert any(line.startswith("logits") for line in commands) == is_ours


def test_no_columns(device):
    bias = torch.tensor([1.0, -2.0, 0.5], device=device)
    empty = router_logits(torch.zeros(2, 0, device=device), torch.zeros(3, 0, device=device), bias)
    assert torch.equal(empty.cpu(), torch.tensor([[1.0, -2.0, 0.5]]).expand(2, 3))


def test_nan_stays_in_its_token(device):
    x = numbers(3, 64).to(device)
    x[1, 7] = torch.nan
    result = router_logits(x, numbers(5, 64).to(device))
    assert result.isnan().sum() == 5 == result[1].isnan().sum()
