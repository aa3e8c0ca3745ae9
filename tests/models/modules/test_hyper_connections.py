"""Layers with hyper-connections run by operators: against the model's own code."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, in_parts, operators_of
from support.recognition import by_operators
from support.sweep import in_sweep

import torch_moe_mps

MIX = "_hyper_connection"
ARCHITECTURES = ("deepseek_v4", "glm5_next", "hy_v4")
MOST_TOKENS = 8  # of the first piece


def model_of(architecture: str, dtype: torch.dtype = torch.float32):
    model = eager(tiny_models.tiny_model(architecture))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "hc" in name:  # zeros and ones at first
            parameter.data += torch.rand(parameter.shape, generator=generator) * 0.3
    return model.to(dtype)


def layers_of(model):
    return [module for module in model.modules() if "attn_hc" in module._modules]


def logits_of(model):
    """Of a prompt of two rows, a token and a few tokens at once."""
    ids = torch.randint(3, 90, (2, MOST_TOKENS + 4), generator=torch.Generator().manual_seed(1))
    return torch.cat(in_parts(model, ids, 1, 3)[0], 1)


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("deepseek_v4", "glm5_next")))
def test_prompts_and_steps(architecture):
    model = model_of(architecture)
    expected = logits_of(model)
    report = torch_moe_mps.accelerate(model)
    head = architecture != "glm5_next"  # its own is a mean
    assert [row.replaced_by for row in report.rows].count(MIX) == 2 * len(layers_of(model)) + head == 4 + head
    ran = operators_of(lambda: assert_close(logits_of(model), expected, 1e-4))
    assert ran[MIX] == 3 * (2 * 2 + head)
    torch_moe_mps.restore(model)
    assert MIX not in operators_of(lambda: logits_of(model))


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("hy_v4",)))
def test_streams_are_no_further_from_the_exact_ones_than_by_the_own_code(architecture):
    """What a module gives for streams in bfloat16, and what the model's own code does."""
    model = model_of(architecture, torch.bfloat16)
    (module, *_) = (layer.ffn_hc for layer in layers_of(model))
    streams = torch.randn(4, 30, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()

    def run(module, streams):
        with torch.no_grad():
            return [result.double() for result in module(streams)]

    exact, own = run(copy.deepcopy(module).float(), streams.float()), run(module, streams)
    torch_moe_mps.accelerate(model)
    found = by_operators(lambda: run(module, streams), MIX)
    for ours, theirs, right in zip(found, own, exact, strict=True):
        assert (ours - right).abs().mean() <= 1.01 * (theirs - right).abs().mean() + 1e-6
