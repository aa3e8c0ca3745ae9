"""Modules whose forward is replaced, as their callers see them."""

import inspect

import torch
from support import tiny_models
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.install import rewrite


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


def test_replaced_forward_has_its_signature():
    """The model's, in the attention of a layer and in its norms."""
    model = tiny_models.tiny_model("qwen3_moe")
    modules = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    before = [inspect.signature(module.forward) for module in modules]
    classes = [*map(type, modules)]
    torch_moe_mps.accelerate(model)
    assert [*map(type, modules)] != classes
    assert [inspect.signature(module.forward) for module in modules] == before


def test_instance_with_its_own_forward_is_left_alone():
    norm = Norm().eval()
    norm.forward = lambda x: x
    assert rewrite(norm) == ([], "its forward was replaced on the instance")
