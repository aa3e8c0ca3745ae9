"""LayerNorms of models run by the operator: against their own code."""

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, edit_forward, operators_of
from torch import nn

import torch_moe_mps

ARCHITECTURES = ("cohere2_moe", "cohere", "nemotron", "olmo")


def model_of(architecture: str):
    model = eager(tiny_models.tiny_model(architecture))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def norms_of(model) -> list[nn.Module]:
    return [module for module in model.modules() if "LayerNorm" in type(module).__name__]


def output_of(model):
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models(architecture):
    model = model_of(architecture)
    expected = output_of(model)
    torch_moe_mps.accelerate(model)
    ran = operators_of(lambda: assert_close(output_of(model), expected, 1e-4))
    assert ran["layer_norm"] == len(norms_of(model)) >= 3
    torch_moe_mps.restore(model)
    assert "layer_norm" not in operators_of(lambda: output_of(model))


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        ("cohere", ".pow(2).mean(", ".pow(2).sum("),
        ("cohere", "variance + self.variance_epsilon", "variance + 2 * self.variance_epsilon"),
        ("nemotron", "self.weight + 1.0", "self.weight + 2.0"),
        ("olmo", "eps=1e-5", "eps=1e-3"),
    ],
)
def test_other_formulas_keep_their_own_code(architecture, old, new):
    model = model_of(architecture)
    for norm in norms_of(model):
        edit_forward(norm, old, new)
    expected = output_of(model)
    torch_moe_mps.accelerate(model)
    assert "layer_norm" not in operators_of(lambda: assert_close(output_of(model), expected, 1e-4))


def test_dtypes_of_weights():
    """A norm that gives its result in the dtype of its input does so with a wider weight, too."""
    model = model_of("cohere")
    torch_moe_mps.accelerate(model)
    norm, x = norms_of(model)[0], torch.randn(2, 3, 32).bfloat16()
    with torch.no_grad():
        expected = torch.nn.functional.layer_norm(x.float(), (32,), norm.weight, None, norm.variance_epsilon)
        ran = operators_of(lambda: assert_close(norm(x), expected.bfloat16(), 8e-3))
    assert ran["layer_norm"] == 1
