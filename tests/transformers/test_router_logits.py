"""Routers that multiply in float32: the operator against their own code."""

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models
from support.launches import launches
from support.models import assert_close, eager, operators_of, output, prompt
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.report import Done
from torch_moe_mps.transformers.rewriting.install import rewrite
from torch_moe_mps.transformers.rewriting.program.formulas import is_pure
from torch_moe_mps.transformers.rewriting.program.straightening import straighten
from torch_moe_mps.transformers.rewriting.rules.router_logits import REPLACE_ROUTER_LOGITS

ROUTERS = ("deepseek_v3", "glm4_moe", "dots1")


def router_of(architecture: str):
    model = eager(tiny_models.tiny_model(architecture, torch.bfloat16))
    return next(m for m in model.modules() if type(m).__name__.endswith("Router"))


def results(router, x):
    with torch.no_grad():
        return router(x)


@pytest.mark.parametrize("architecture", ROUTERS)
def test_routers(architecture):
    """The same experts and weights, for one token and for a prompt."""
    router = router_of(architecture)
    for tokens in (1, 33):
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        torch_moe_mps.restore(router)
        own = results(router, x)
        assert Done("router_logits") in rewrite(router)[0]
        used = operators_of(lambda: results(router, x))  # noqa: B023
        assert used == {"router_logits": 1, "moe_router": 1}
        for a, b in zip(results(router, x), own, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_casts(simulated):
    """One launch in the place of two casts and a matmul."""
    router = router_of("deepseek_v3").to("mps")
    rewrite(router)
    x = torch.ones(1, 32, dtype=torch.bfloat16, device="mps")
    counts = launches(simulated, lambda: results(router, x))
    assert counts["logits_few_bf16"] == 1 and not counts["mm"] and not counts["linear"]


def test_a_whole_model():
    model = eager(tiny_models.tiny_model("deepseek_v3", torch.bfloat16))
    expected = output(model, prompt())
    torch_moe_mps.accelerate(model)
    assert operators_of(lambda: output(model, prompt()))["router_logits"] == 1
    assert_close(output(model, prompt()), expected, 0.05)


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8).bfloat16(), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(6), requires_grad=False)


class Named(Multiplies):
    def forward(self, x):
        wide = x.view(-1, 8).to(torch.float32)
        weight = self.weight.float()
        logits = F.linear(wide, weight, self.bias)
        return logits


class ChangedBetween(Multiplies):
    def forward(self, x):
        wide = x.float()
        for _ in range(2):
            x *= 2.0
        logits = F.linear(wide, self.weight.float())
        return logits


class OtherCasts(Multiplies):
    def forward(self, x):
        logits = F.linear(x.double(), self.weight.double()) + F.linear(x, self.weight)
        return logits


@pytest.mark.parametrize(("cls", "found"), [(Named, True), (ChangedBetween, False), (OtherCasts, False)])
def test_programs(cls, found):
    module, x = cls(), torch.randn(3, 8).bfloat16()
    program = straighten(module)
    REPLACE_ROUTER_LOGITS(program)
    assert program.rewrites == ([Done("router_logits")] if found else [])
    forward = program.compile(is_pure)
    assert operators_of(lambda: forward(module, x)) == ({"router_logits": 1} if found else {})
    torch.testing.assert_close(forward(module, x.clone()), module(x.clone()), rtol=1e-5, atol=1e-5)
