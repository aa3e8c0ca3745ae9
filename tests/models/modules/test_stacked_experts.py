"""Experts without transformers' interface: recognised by what their forward computes, or left alone."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models
from support.models import assert_close, operators_of
from torch import nn

import torch_moe_mps
from torch_moe_mps.models.basics.interface import INTERFACE, formats_of, recognise
from torch_moe_mps.models.basics.state import Unsupported
from torch_moe_mps.quantization import QuantizedWeight, dequantize

EXPERTS, HIDDEN, INNER = 5, 64, 32


class Stacked(nn.Module):
    """Loops over the experts that were chosen, as Step-3.7 and LongCat do."""

    halves, transposed, others, first, has_bias = 2, False, 0, "gate_up_proj", False

    def __init__(self, experts=EXPERTS, hidden=HIDDEN, inner=INNER):
        super().__init__()
        self.num_experts, self.hidden_dim = experts, hidden
        shapes = (experts + self.others, self.halves * inner, hidden), (experts, hidden, inner)
        for name, (count, rows, columns) in zip((self.first, "down_proj"), shapes, strict=True):
            shape = (columns, rows) if self.transposed else (rows, columns)
            setattr(self, name, nn.Parameter(torch.empty(count, *shape)))
            if self.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(count, rows)))

    def multiplied(self, name, rows, expert):
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return F.linear(rows, weight.T if self.transposed else weight, bias)

    def between(self, rows):
        gate, up = rows.chunk(2, -1)
        return F.silu(gate) * up

    def one(self, rows, expert):
        return self.multiplied("down_proj", self.between(self.multiplied(self.first, rows, expert)), expert)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            slots, tokens = torch.where(expert == top_k_index.T)
            if expert < self.num_experts:
                rows = self.one(hidden_states[tokens], expert)
            elif self.others:
                rows = hidden_states[tokens]
            else:
                continue
            out.index_add_(0, tokens, rows * top_k_weights[tokens, slots, None])
        return out


class Transposed(Stacked):
    transposed, has_bias = True, True


class EveryOther(Stacked):
    def between(self, rows):
        return F.gelu(rows[..., 0::2]) * rows[..., 1::2]


class NoGate(Stacked):
    halves, first = 1, "up_proj"

    def between(self, rows):
        return F.relu(rows).square()


class Limited(Stacked):
    def __init__(self, limit=0.5):
        super().__init__()
        self.some_number, self.bound = 3, limit

    def between(self, rows):
        gate, up = rows.chunk(2, -1)
        return F.silu(gate).clamp(max=self.bound) * up.clamp(-self.bound, self.bound)


class ZeroExperts(Stacked):
    others = 3


class Square(Stacked):
    """Equal sizes of different kinds, which stay equal in a trial."""

    def __init__(self):
        super().__init__(experts=32, hidden=64, inner=32)


class AllOnRows(Stacked):
    """Takes rows for each expert, as Llama 4's."""

    transposed = True

    def forward(self, hidden_states):
        rows = hidden_states.view(self.num_experts, -1, self.hidden_dim)
        return torch.bmm(self.between(torch.bmm(rows, self.gate_up_proj)), self.down_proj).flatten(0, 1)


KNOWN = {
    Stacked: "silu",
    Transposed: "silu",
    EveryOther: "gelu",
    NoGate: "relu2",
    Limited: "silu_capped",
    ZeroExperts: "silu",
    Square: "silu",
}


def made(cls, seed=0):
    module = cls().eval()
    tiny_models.randomise(module, seed)
    return module


def arguments(module, tokens=7):
    generator = torch.Generator().manual_seed(0)
    x, weights = (
        3 * torch.randn(tokens, HIDDEN, generator=generator),
        torch.rand(tokens, 2, generator=generator),
    )
    count = len(getattr(module, module.first)) + 1  # one id is of no expert
    count -= bool(module.others)
    return x, torch.rand(tokens, count, generator=generator).argsort(-1)[:, :2], weights


@pytest.mark.parametrize("cls", KNOWN)
def test_experts_are_recognised(cls):
    module = made(cls)
    given = arguments(module)
    with torch.no_grad():
        expected = module(*given)
        report = torch_moe_mps.accelerate(module)
        assert operators_of(lambda: module(*given)).get("_moe_experts") == 1, str(report)
        assert_close(module(*given), expected, 1e-5)
        copied = pickle.loads(pickle.dumps(module)) if cls is Stacked else copy.deepcopy(module)
        assert_close(copied(*given), expected, 1e-5)
        assert type(module).__name__ == cls.__name__ and isinstance(module, cls)
    assert recognise(module).activation.activation == KNOWN[cls]
    torch_moe_mps.restore(module)
    assert type(module) is cls and not vars(module).keys() & {*INTERFACE}
    assert torch.equal(module(*given), expected)


@pytest.mark.parametrize("cls", KNOWN)
def test_quantised_experts(cls):
    module = made(cls)
    twin, given = copy.deepcopy(module), arguments(module)
    torch_moe_mps.accelerate(module, bits=4, group_size=32)
    for name, format in formats_of(module).items():
        parts = (getattr(module, f"{name}_{part}") for part in ("packed", "scales", "biases"))
        weight = dequantize(QuantizedWeight(*parts, format), torch.float32)
        getattr(twin, name).data = weight.mT.contiguous() if module.transposed else weight
    torch_moe_mps.restore(module)  # quantised experts stay
    with torch.no_grad():
        assert operators_of(lambda: module(*given)).get("_moe_experts_quantized") == 1
        assert_close(module(*given), twin(*given), 1e-5)


def test_rows_for_each_expert():
    module = made(AllOnRows)
    rows = torch.randn(EXPERTS * 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(rows)
        assert recognise(module).takes_rows
        torch_moe_mps.accelerate(module, bits=8, group_size=32)
        assert operators_of(lambda: module(rows))["_moe_experts_quantized"] == 1
        assert_close(module(rows), expected, 2e-2)


class SquaredWeights(Stacked):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.square())


class OfOneGate(Stacked):
    """One expert's gate is another one's, as no stack of matrices is read."""

    def one(self, rows, expert):
        return super().one(rows, max(expert, 1))


class LargeValuesApart(Stacked):
    """As silu, up to a bound that numbers about 1 never reach."""

    def between(self, rows):
        gate, up = rows.chunk(2, -1)
        return torch.where(gate.abs() < 90.0, F.silu(gate), gate) * up.clamp(max=70.0)


class OtherNames(Stacked):
    first = "w1"


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SquaredWeights, "none of the operators' forms"),
        (OfOneGate, "none of the operators' forms"),
        (LargeValuesApart, "none of the operators' forms"),
        (OtherNames, "its stacks of matrices are called w1, down_proj"),
    ],
)
def test_near_misses_are_left_alone(cls, reason):
    module = made(cls)
    with pytest.raises(Unsupported, match=reason):
        recognise(module)
    given = arguments(module)
    expected = module(*given)
    with pytest.warns(UserWarning, match=reason):
        torch_moe_mps.accelerate(module)
    assert type(module) is cls and torch.equal(module(*given), expected)


def test_a_limit_that_changes_afterwards():
    module = made(Limited)
    given = arguments(module)
    torch_moe_mps.accelerate(module)
    for bound in (0.25, float("inf")):
        module.bound = bound
        with torch.no_grad():
            assert_close(module(*given), Limited.forward(module, *given), 1e-5)
            assert operators_of(lambda: module(*given)) == {"_moe_experts": 1}


def test_factors_of_three_dimensions_are_no_stacks(recwarn):
    """Those of RWKV's blocks."""
    model = tiny_models.tiny_model("rwkv")
    torch_moe_mps.accelerate(model)
    assert not [str(warning.message) for warning in recwarn if "stacks of matrices" in str(warning.message)]
