"""Quantised MLPs as one call of mlp_quantized: activations of both halves, one layer for both halves."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, edit_forward, operators_of

import torch_moe_mps

CASES = {"deepseek_v4": "DeepseekV4MLP", "minimax_m3_vl": "MiniMaxM3VLDenseMLP"}


def check(architecture: str, runs: bool, edit: tuple[str, str] | None = None) -> None:
    """Whether the MLPs run on the operator, with the result of a dense model with the same weights."""
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture))
    mlps = [module for module in model.modules() if type(module).__name__ == CASES[architecture]]
    for mlp in mlps:
        if hasattr(mlp, "limit") or hasattr(mlp, "swiglu_limit"):
            setattr(mlp, "limit" if hasattr(mlp, "limit") else "swiglu_limit", 0.02)  # so that it matters
        if edit is not None:
            edit_forward(mlp, *edit)
    dense = copy.deepcopy(model)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    twin = tiny_models.dense_twin(dense, model)
    ids = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = twin(ids).logits
        ran = operators_of(lambda: assert_close(model(ids).logits, expected, 1e-4))
    assert ran.get("mlp_quantized", 0) == (len(mlps) if runs else 0)


@pytest.mark.parametrize("architecture", CASES)
def test_models(architecture):
    check(architecture, runs=True)


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        ("deepseek_v4", "clamp(max=self.limit)", "clamp(max=2 * self.limit)"),
        ("deepseek_v4", "clamp(min=-self.limit", "clamp(min=0.5 * self.limit"),
        ("minimax_m3_vl", "up + 1.0", "up + 2.0"),
    ],
)
def test_other_formulas_keep_their_own_code(architecture, old, new):
    check(architecture, runs=False, edit=(old, new))
