"""Rewritten forwards compute what the model's own code computes, however it is written."""

import inspect
import traceback

import pytest
import torch
from support import tiny_models
from support.future_models import FutureBlock
from support.models import assert_close
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.rewriting.install import is_rewritten, rewrite


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class Layer(FutureBlock):
    """What the layers below have in common."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.after = Norm()
        self.double = True

    def moe(self, x):
        _, weights, ids = self.router(x)
        return self.experts(x, ids, weights)


class Chained(Layer):
    def forward(self, x, y):
        residual = x
        x = x + y
        residual = x
        x = self.norm(x)
        return residual + self.moe(x)


class Branching(Layer):
    """A branch that the module decides, and one that only the input does."""

    def forward(self, x, y):
        if self.double:
            y = y * 2
        if x.shape[0] > 3:
            y = y + 1
        total = x + y
        x = self.norm(total)
        if x.shape[0] > 5:
            total = total * 3
        return total + self.moe(x)


class Reassigned(Layer):
    """The sum is not what reaches the norm."""

    def forward(self, x, y):
        total = x + y
        if x.shape[0] > 0:
            total = total * 2
        return total + self.moe(self.norm(total))


class InPlace(Layer):
    """The normed value is changed in place before it is added."""

    def forward(self, x, y):
        normed = self.norm(y)
        y *= 3
        return x + normed + self.moe(y)


class Aliased(Layer):
    """An in-place change that is seen through another name."""

    def forward(self, x, y):
        total = x + y
        residual = total
        total *= 2
        return residual + self.moe(self.norm(total))


class Post(Layer):
    def forward(self, x, y):
        y = self.after(y)
        y = x + y
        return y + self.moe(y)


class Looping(Layer):
    def forward(self, x, y):
        for _ in range(2):
            x = x + y
        return self.moe(self.norm(x))


class EarlyReturn(Layer):
    def forward(self, x, y):
        if x.shape[0] == 0:
            return x
        return self.moe(self.norm(x + y))


class OwnInPlace(Layer):
    """The input of the norm is changed in place, before what was normed of it is added."""

    def forward(self, x, y):
        y = y * 2
        normed = self.after(y)
        y *= 3
        total = x + normed
        return total + self.moe(y)


class SumWithNumber(Layer):
    """What is added before the norm is no tensor."""

    def forward(self, x, y):
        x = x + 1
        x = self.norm(x)
        return y + self.moe(x)


class SumInPlace(Layer):
    """The sum is changed in place by a branch before it is normed."""

    def forward(self, x, y):
        total = x + y
        if x.shape[0] > 0:
            total.mul_(2)
        x = self.norm(total)
        return total + self.moe(x)


class UsedUnderTwoNames(Layer):
    """What the norm gives is added, and read under another name."""

    def forward(self, x, y):
        normed = self.after(y)
        kept = normed
        total = x + kept
        return total + self.moe(kept)


def normed(x):
    return x * 0.5


class NameOfAGlobal(Layer):
    """The variable that holds the norm's results must not hide a function of the same name."""

    def forward(self, x, y):
        total = x + y
        x = self.norm(total)
        return normed(total) + self.moe(x)


class InBranch(Layer):
    """A sum and its norm in one branch of two."""

    def forward(self, x, y):
        total = x + y
        if x.shape[0] > 3:
            total = total + y
            x = self.norm(total)
        else:
            x = self.after(total)
        return total + self.moe(x)


class NormInBranch(Layer):
    """The sum is needed on both ways, its norm on one."""

    def forward(self, x, y):
        total = x + y
        x = total
        if x.shape[0] > 3:
            x = self.norm(total)
        return total + self.moe(x)


class AliasedInBranch(Layer):
    """An in-place change that is seen through another name if a branch did not run."""

    def forward(self, x, y):
        total = x + y
        kept = total
        if x.shape[0] > 3:
            total = total * 3
        total *= 2
        return kept + self.moe(self.norm(total))


class ReadInBranch(Layer):
    """What one branch reads is computed there, unless it is changed in place before."""

    def forward(self, x, y):
        half, third = y.float(), x + y
        before = third * 1
        third *= 2
        if x.shape[0] > 3:
            x = x + half
        else:
            x = x - before
        return third + self.moe(self.norm(x))


class Generated(Layer):
    def forward(self, x, y):
        x, y = (self.norm(z) for z in (x, y))
        return x + self.moe(y)


CASES = {
    InBranch: ["fused_residual_norm (norm)", "rms_norm (after)"],
    NormInBranch: ["rms_norm (norm)"],
    AliasedInBranch: "its forward changes a tensor in place that has another name",
    ReadInBranch: ["rms_norm (norm)"],
    Generated: ["fused_norm_add (norm)", "rms_norm (norm)"],
    Chained: ["fused_residual_norm (norm)"],
    Branching: ["fused_residual_norm (norm)"],
    Post: ["fused_norm_add (after)"],
    Reassigned: ["rms_norm (norm)"],
    InPlace: "its forward changes a tensor in place that has another name",
    Aliased: "its forward changes a tensor in place that has another name",
    OwnInPlace: ["rms_norm (after)"],
    SumWithNumber: ["fused_residual_norm (norm)"],
    SumInPlace: ["rms_norm (norm)"],
    UsedUnderTwoNames: ["rms_norm (after)"],
    NameOfAGlobal: ["fused_residual_norm (norm)"],
    Looping: "nothing here but calls of its parts",
    EarlyReturn: "its forward returns from within a branch or defines functions",
}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_rewriting_of_a_forward(cls):
    layer = cls().eval()
    tiny_models.randomise(layer, 1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 7, 16, generator=generator)
    with torch.no_grad():
        expected, of_two = layer(x.clone(), y.clone()), layer(x[:2].clone(), y[:2].clone())
        rewrites, reason = rewrite(layer)
        assert ([*map(str, rewrites)] or reason) == CASES[cls]
        assert is_rewritten(layer) == bool(rewrites)
        assert_close(layer(x.clone(), y.clone()), expected, 1e-5)
        assert_close(layer(x=x.clone(), y=y.clone()), expected, 1e-5)
        assert_close(layer(x[:2].clone(), y[:2].clone()), of_two, 1e-5)


@pytest.mark.parametrize("cls", [Chained, Post])
def test_norm_whose_weight_widens_its_result(cls):
    """bfloat16 times a float32 weight is float32, which the operators would not give."""
    layer = cls().eval()
    tiny_models.randomise(layer, 1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 7, 16, generator=generator).bfloat16()
    with torch.no_grad():
        expected = layer(x, y)
        assert [*map(str, rewrite(layer)[0])] == CASES[cls]
        assert expected.dtype == torch.float32
        assert_close(layer(x, y), expected, 1e-5)


def test_rewritten_forward_has_source_and_signature():
    """Tracebacks and debuggers show the code that runs; the signature is the model's."""
    model = tiny_models.tiny_model("qwen3_moe")
    layer = model.model.layers[0]
    before = inspect.signature(layer.forward)
    torch_moe_mps.accelerate(model)
    assert inspect.signature(layer.forward) == before
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        layer(torch.ones(1, 2, 31), position_embeddings=(torch.ones(1), torch.ones(1)))
    lines = [frame.line for frame in traceback.extract_tb(error.tb) if "torch_moe_mps" in frame.filename]
    assert any("rms_norm(" in line and "self.input_layernorm, hidden_states)" in line for line in lines)


def test_instance_with_its_own_forward_is_left_alone():
    layer = Chained().eval()
    layer.forward = lambda x, y: x
    assert rewrite(layer) == ([], "its forward was replaced on the instance")


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(16, 16), Norm()])

    def forward(self, x):
        return self.steps[0](nn.functional.silu(self.steps[0](x)) * self.steps[1](x))


def test_modules_of_a_list_have_no_name():
    module, x = Indexed().eval(), torch.randn(3, 16)
    with torch.no_grad():
        expected = module(x)
        assert rewrite(module)[0] == []
        assert torch.equal(module(x), expected)
