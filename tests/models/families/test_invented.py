"""An architecture that nobody has: three matrices of one shape, two of them turned and in a child.

What it needs is in this file: a recogniser and the method of its class, as a family's folder has them, and
the row in a table, which `wiring.py` fills.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models
from support.models import assert_close, operators_of
from torch import nn

import torch_moe_mps
from torch_moe_mps.checkpoints.stacks import of_stacks, settle_stacks
from torch_moe_mps.models.basics import interface
from torch_moe_mps.models.basics.experts import recognised
from torch_moe_mps.models.basics.stacks import Stack
from torch_moe_mps.models.families import Family
from torch_moe_mps.models.modules.experts import combined, operator_call
from torch_moe_mps.models.modules.stacked_experts import (
    Sizes,
    beside_replica,
    shapes_below,
    tried_form,
)
from torch_moe_mps.models.trials.draws import normal
from torch_moe_mps.models.trials.forms import first_form
from torch_moe_mps.ops._activations import POINTWISE, Activation
from torch_moe_mps.quantization import QuantizedWeight, dequantize

EXPERTS, HIDDEN, INNER = 5, 64, 32


class Into(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER)) for _ in range(2))


class OddExperts(nn.Module):
    """Weights before ids; gate and up projections are [E, input, output], the others [E, output, input]."""

    def __init__(self):
        super().__init__()
        self.count, self.into, self.act = EXPERTS, Into(), nn.SiLU()
        self.out_of = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))

    def forward(self, x, weights, ids):
        out = torch.zeros_like(x)
        for expert in range(self.count):
            tokens, slots = torch.where(ids == expert)
            rows = self.between(x[tokens] @ self.into.gate[expert], x[tokens] @ self.into.up[expert])
            out.index_add_(0, tokens, rows @ self.out_of[expert].T * weights[tokens, slots, None])
        return out

    def between(self, gate, up):
        return self.act(gate) * up


class OtherOrder(OddExperts):
    """A near miss: the up projection is activated."""

    def between(self, gate, up):
        return gate * self.act(up)


# --- the family's folder

PATHS = "into.gate", "into.up", "out_of"
STACKS = (
    ("gate_up_proj", Stack(PATHS[:2], is_transposed=True)),
    ("down_proj", Stack(PATHS[2:])),
)


def recognise_odd_experts(module):
    shapes = shapes_below(module, PATHS)
    if shapes is None:
        return None
    count, hidden, inner = dict(shapes)["into.gate"]
    sizes, about = (
        Sizes(count, 0, hidden, inner, 1),
        {"methods": (("forward", with_forward),), "act_fn": "act"},
    )
    forms = [recognised(Activation(name), STACKS, count, shapes, **about) for name in POINTWISE]
    return first_form(module, forms, begin, sizes)


def begin(module, sizes):
    def inputs(_, small):
        ids = torch.stack([torch.randperm(small.experts)[:2] for _ in range(6)])
        return normal(6, small.hidden), normal(6, 2), ids

    def ours(form, replica, x, weights, ids):
        return tried_form(form, replica, x, ids, weights)

    return beside_replica(module, sizes, ours, inputs=inputs)


def with_forward(own):
    def forward(self, x, weights, ids):
        if (call := operator_call(self, x, weights)) is None:
            return own(self, x, weights, ids)
        return combined(self, x, ids, weights, call)

    return forward


FAMILY = Family(recognisers=(recognise_odd_experts,))


# --- the row, and the tests


@pytest.fixture(autouse=True)
def row(monkeypatch):
    monkeypatch.setattr(interface, "RECOGNISERS", [*interface.RECOGNISERS, *FAMILY.recognisers])


def made(cls=OddExperts):
    module = cls().eval()
    tiny_models.randomise(module, 0)
    return module


def arguments(tokens=7):
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, 2, generator=generator)
    return x, weights, torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :2]


def of_weights(gate, up, down, x, weights, ids):
    """In float64, from matrices [E, output, input]."""
    x, weights, gate, up, down = (each.double() for each in (x, weights, gate, up, down))
    inner = F.silu(torch.einsum("th,tkfh->tkf", x, gate[ids])) * torch.einsum("th,tkfh->tkf", x, up[ids])
    return torch.einsum("tkf,tkhf,tk->th", inner, down[ids], weights).float()


def matrices(module):
    return module.into.gate.mT, module.into.up.mT, module.out_of


@torch.no_grad()
def test_dense_stacks():
    module, given = made(), arguments()
    expected = of_weights(*matrices(module), *given)
    torch_moe_mps.accelerate(module)
    assert operators_of(lambda: module(*given)) == {"expert_mm": 3, "moe_weighted_reduce": 1}
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_close(each(*given), expected, 1e-5)
    module.train()
    assert not operators_of(lambda: module(*given))
    torch_moe_mps.restore(module.eval())
    assert type(module) is OddExperts and vars(module).keys() == vars(made()).keys()
    assert not operators_of(lambda: module(*given))


@torch.no_grad()
def test_packed_stacks():
    module, given = made(), arguments()
    torch_moe_mps.accelerate(module, bits=4, group_size=32)
    assert not dict(module.named_parameters()).keys() & {*PATHS}
    parts = {}
    for name, format in interface.formats_of(module).items():
        tensors = (getattr(module, f"{name}_{part}") for part in ("packed", "scales", "biases"))
        parts[name] = dequantize(QuantizedWeight(*tensors, format), torch.float32)
    expected = of_weights(*parts["gate_up_proj"].chunk(2, 1), parts["down_proj"], *given)
    torch_moe_mps.restore(module)  # packed experts stay
    assert operators_of(lambda: module(*given)) == {"_moe_experts_quantized": 1}
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_close(each(*given), expected, 1e-5)


@torch.no_grad()
def test_a_checkpoint_is_read_into_the_stacks_of_forwards():
    source, given = made(), arguments()
    model = nn.ModuleDict({"experts": made()}).to("meta")
    settle_stacks(model)
    rows = {each.target_patterns[0]: each for each in of_stacks(model)}
    assert rows.keys() == {"experts.gate_up_proj", "experts.down_proj"}
    experts = model["experts"]
    for target, converter in rows.items():
        stored = [source.get_parameter(name.partition(".")[2]).data for name in converter.source_patterns]
        (operation,) = converter.operations
        (stack,) = operation.function(stored)
        setattr(experts, target.partition(".")[2], nn.Parameter(stack))
    assert operators_of(lambda: experts(*given))["_moe_experts"] == 1
    assert_close(experts(*given), of_weights(*matrices(source), *given), 1e-5)


def test_a_near_miss_is_left_alone():
    module, given = made(OtherOrder), arguments()
    expected = module(*given)
    torch_moe_mps.accelerate(module)
    assert type(module) is OtherOrder and torch.equal(module(*given), expected)
