"""Routers as modules that call moe_router: the same results as their own code, and when that runs instead."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models
from support.launches import launches
from support.models import eager, operators_of
from support.recognition import by_operators
from torch import nn

import torch_moe_mps
from torch_moe_mps.models.basics.report import Done
from torch_moe_mps.transformers.install import rewrite

ROUTERS = ("deepseek_v3", "glm4_moe", "dots1")


def router_of(architecture: str):
    model = eager(tiny_models.tiny_model(architecture, torch.bfloat16))
    return next(m for m in model.modules() if type(m).__name__.endswith("Router"))


@pytest.mark.parametrize("architecture", ROUTERS)
def test_matmuls_in_float32(architecture):
    """The same experts and weights, for one token and for a prompt."""
    router = router_of(architecture)
    for tokens in (1, 33):
        with torch.no_grad():
            assert check_router(router, hidden(tokens)) == BOTH


def test_no_casts(simulated):
    """One launch in the place of two casts and a matmul."""
    router = router_of("deepseek_v3").to("mps")
    rewrite(router)
    x = torch.ones(1, 32, dtype=torch.bfloat16, device="mps")
    counts = launches(simulated, lambda: router(x))
    kind = "f32" if router.weight.dtype == torch.float32 else "bf16"  # as transformers loads it
    assert counts[f"logits_few_{kind}"] == 1 and not counts["mm"] and not counts["linear"]


class Router(nn.Module):
    """Groups, a bias for the choice, a matmul in float32 and results in the dtype of the hidden states."""

    def __init__(self, dtype=torch.bfloat16, groups=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Linear(32, 16, dtype=dtype)
        for parameter in self.gate.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.register_buffer("bias", 0.1 * torch.randn(16, generator=generator))
        self.groups, self.top_k, self.scale = groups, 3, 1.5

    def forward(self, x, unused=None, *, width=32):
        logits = F.linear(x.float().reshape(-1, width), self.gate.weight.float(), self.gate.bias.float())
        scores = logits.sigmoid()
        choice = scores + self.bias
        best = choice.view(-1, self.groups, 16 // self.groups).topk(2, dim=2)[0].sum(2).topk(2, dim=1)[1]
        chosen = torch.zeros(best.shape[0], self.groups).scatter_(1, best, 1.0).bool()
        mask = chosen[:, :, None].expand(-1, -1, 16 // self.groups).reshape(-1, 16)
        ids = choice.masked_fill(~mask, -torch.inf).topk(self.top_k, 1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-9)
        return logits, (weights * self.scale).to(x.dtype), ids


class OfMatrix(Router):
    """A matrix that stays in float32, and the bias as an argument."""

    def forward(self, x, bias):
        logits = self.gate(x.float())
        scores = logits.sigmoid()
        ids = (bias + scores).topk(self.top_k).indices
        return logits, scores.gather(-1, ids).to(x.dtype), ids


def hidden(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_router(router, *arguments, **named) -> dict[str, int]:
    """The same results as the module's own code; returns the operators that ran."""
    expected = nn.Module.__call__(copy.deepcopy(torch_moe_mps.restore(router)), *arguments, **named)
    done, reason = rewrite(router)
    assert Done("moe_router", "moe_router (sigmoid)") in done, reason
    used = operators_of(lambda: router(*arguments, **named))
    for result, own in zip(router(*arguments, **named), expected, strict=True):
        assert (result.dtype, result.shape) == (own.dtype, own.shape)
        torch.testing.assert_close(result, own, rtol=1e-2 if own.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    return used


BOTH = {"router_logits": 1, "moe_router": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_groups_and_shapes(dtype):
    router = Router(dtype).eval()
    for x in (hidden(1), hidden(7), hidden(2, 3), hidden(0), torch.randn(32, 6).T):
        used = check_router(router, x.to(dtype))
        assert used == (BOTH if dtype != torch.float32 else {"moe_router": 1})
    assert check_router(router, unused=None, x=hidden(5).to(dtype)).keys() >= {"moe_router"}
    assert check_router(router.to(torch.float32), hidden(2, 2, dtype=torch.float32)) == {"moe_router": 1}
    assert check_router(router.to(torch.bfloat16), hidden(2, 2)) == BOTH


@torch.no_grad()
def test_a_matrix_in_float32_and_an_argument():
    router, bias = OfMatrix(torch.float32).eval(), torch.linspace(0.5, -0.5, 16)
    assert check_router(router, hidden(4), bias) == BOTH
    assert check_router(router, hidden(4), bias=bias.bfloat16()) == BOTH
    assert check_router(router, hidden(4, dtype=torch.float32), bias) == {"moe_router": 1}
    assert check_router(router, hidden(4), bias=bias) == BOTH
    assert check_router(router, hidden(2, 3), bias) == {}  # not made into rows


@torch.no_grad()
def test_own_code_when_something_changed():
    x, router = hidden(5), Router().eval()
    assert check_router(router, x) == BOTH
    assert operators_of(lambda: router(x, width=32)) == {}
    for name, value in (("top_k", 2), ("scale", 2.0), ("groups", 2)):
        assert check_router(router, x) == BOTH
        before = getattr(router, name)
        setattr(router, name, value)
        assert operators_of(lambda: router(x)) == {}
        setattr(router, name, before)
        assert operators_of(lambda: router(x)) == BOTH
    handle = router.gate.register_forward_hook(lambda *_: None)  # its weight is read, or it is called
    assert operators_of(lambda: router(x)) == {}
    handle.remove()
    router.gate.weight = nn.Parameter(-router.gate.weight)
    assert check_router(router, x) == BOTH


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
        dtypes = [result.dtype for result in by_operators(lambda: router(x), "moe_router")]
        torch_moe_mps.restore(model)
        assert dtypes == [result.dtype for result in router(x)]
