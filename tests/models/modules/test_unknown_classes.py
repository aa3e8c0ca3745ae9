"""Classes unknown to transformers: accelerated if their interface and formulas fit, else left alone."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import tiny_models
from support.future_models import Config, FutureBlock, FutureExperts, FutureRouter, random_block
from support.models import assert_close, operators_of, output, prompt
from support.recognition import by_operators
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.install import rewrite

transformers.logging.set_verbosity_error()


def test_unknown_class_that_follows_the_interface():
    block, x = random_block(FutureBlock)
    with torch.no_grad():
        expected = block(x)
        report = torch_moe_mps.accelerate(block)
        assert_close(block(x), expected, 1e-5)
        assert operators_of(lambda: block(x)) == {"expert_mm": 2, "moe_weighted_reduce": 1}
    rows = {row.kind: row for row in report.rows}
    assert rows["experts"].replaced_by == "expert_mm, own activation; moe_weighted_reduce"
    assert rows["router"].reason == "its formula is not one of moe_router's"


class OtherExperts(nn.Module):
    """A stack of experts with an interface that is not known here."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.ones(4, 8, 16))


def test_experts_with_another_interface_are_left_alone():
    module = nn.Sequential(OtherExperts())
    with pytest.warns(UserWarning, match="OtherExperts is left alone: its class does not follow"):
        report = torch_moe_mps.accelerate(module)
    assert [(row.name, row.replaced_by) for row in report.rows] == [("0", None)]


class SeparateExperts(nn.ModuleDict):
    pass


def test_experts_with_a_capacity_are_left_alone():
    """Switch Transformers computes nothing for tokens beyond it."""
    config = transformers.SwitchTransformersConfig(d_model=16, d_ff=16, num_experts=3)
    block = transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersSparseMLP(
        config
    )
    with pytest.warns(
        UserWarning, match="is left alone: its router drops the tokens beyond an expert's capacity"
    ):
        torch_moe_mps.accelerate(block.eval())


@pytest.mark.parametrize("container", ["list", "dict"])
def test_experts_that_are_modules_are_left_alone(container):
    """By the name of the list, or of the class; shared experts are none of it."""
    model, experts = nn.Module(), [nn.Linear(4, 4), nn.Linear(4, 4)]
    model.shared_experts = nn.ModuleList(experts)
    if container == "list":
        model.experts = nn.ModuleList(experts)
    else:
        model.mlp = SeparateExperts({"expert_0": experts[0]})
    with pytest.warns(UserWarning, match="is left alone: each expert is a module"):
        report = torch_moe_mps.accelerate(model)
    assert [row.name for row in report.left_alone] == ["experts" if container == "list" else "mlp"]


def test_norms_around_experts_with_another_activation():
    model = tiny_models.tiny_model("jetmoe").eval()
    for layer in model.model.layers:
        layer.mlp.activation = nn.Tanh()
    expected = output(model, prompt())
    with pytest.warns(UserWarning, match="JetMoeParallelExperts is left alone"):
        report = torch_moe_mps.accelerate(model)
    # Norms, rotations in attention, and the projections of attention
    assert {(row.kind, row.cls == "JetMoeMoA") for row in report.replaced} == {
        ("other", False),
        ("experts", True),
    }
    assert_close(by_operators(lambda: output(model, prompt()), "rms_norm", "rope"), expected, 1e-5)


def test_experts_in_another_dtype_are_left_alone():
    block = FutureBlock().to(torch.float64).eval()
    with pytest.warns(UserWarning, match="FutureExperts is left alone: its weights are torch.float64"):
        report = torch_moe_mps.accelerate(block)
    rows = {row.kind: row for row in report.rows}
    assert rows["experts"].reason == "its weights are torch.float64"
    assert block.experts.config._experts_implementation == "eager"


def over_tokens(router, x, logits):
    return logits, *torch.topk(logits.softmax(0), router.top_k, dim=-1)


def logits_that_change(router, x, logits):
    """What the ids are computed of is another value in the end."""
    weights, ids = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
    logits *= 2
    return logits, weights, ids


def late_logits(router, x, logits):
    """What the router returns first is computed after the ids."""
    weights, ids = torch.topk(logits.softmax(-1), router.top_k, dim=-1)
    return logits * 2, weights, ids


def in_groups(router, x, logits):
    """The scores of each half of the experts add up to 1."""
    scores = logits.view(-1, 2, 2).softmax(-1).view(-1, 4)
    return logits, *torch.topk(scores, router.top_k, dim=-1)


def adds_hidden_states(router, x, logits):
    """What is added to the scores differs from token to token."""
    scores = logits.softmax(-1)
    ids = torch.topk(scores + x[:, :4], router.top_k, dim=-1).indices
    return logits, scores.gather(1, ids), ids


@pytest.mark.parametrize(
    "choose", [over_tokens, logits_that_change, late_logits, in_groups, adds_hidden_states]
)
def test_routers_of_other_formulas(choose):
    class Other(FutureRouter):
        def forward(self, hidden_states):
            return choose(self, hidden_states, F.linear(hidden_states, self.weight))

    assert rewrite(Other().eval()) == ([], "its formula is not one of moe_router's")


class ClampedApart(FutureExperts):
    """As silu_clamped, but with other limits of the up half below than above."""

    low, high = 0.25, 1.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self.high)) * up.clamp(-self.low, self.high)


class ClampedAlike(ClampedApart):
    low = 1.0


class OfFixedSizes(ClampedAlike):
    """Its halves are as wide as the second matrix, and not as half of what goes into the first one."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.split(12, dim=-1)
        return F.silu(gate) * up


def future_experts(cls):
    experts = cls(Config()).eval()
    tiny_models.randomise(experts, 0)
    return experts


@pytest.mark.parametrize(
    ("cls", "operators"),
    [
        (ClampedAlike, {"_moe_experts": 1}),
        (ClampedApart, {"expert_mm": 2, "moe_weighted_reduce": 1}),
        (OfFixedSizes, {"_moe_experts": 1}),
    ],
)
def test_activations_of_other_code(cls, operators):
    experts = future_experts(cls)
    generator = torch.Generator().manual_seed(0)
    x, weights = 9 * torch.randn(7, 16, generator=generator), torch.rand(7, 2, generator=generator)
    ids = torch.rand(7, 4, generator=generator).argsort(-1)[:, :2]
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch_moe_mps.accelerate(experts)
        assert operators_of(lambda: experts(x, ids, weights)) == operators
        assert_close(experts(x, ids, weights), expected, 1e-5)


def test_more_slots_than_the_operators_take():
    """The model's own code computes them."""
    experts = future_experts(FutureExperts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 16, generator=generator)
    ids, weights = torch.randint(4, (7, 65), generator=generator), torch.rand(7, 65, generator=generator)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        torch_moe_mps.accelerate(experts)
        assert operators_of(lambda: experts(x, ids, weights)) == {}
        assert_close(experts(x, ids, weights), expected, 1e-5)
