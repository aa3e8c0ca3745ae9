"""Attention with a bias of relative positions, as in Inkling 2: no element for each pair of tokens."""

import pytest
import torch
from support import tiny_models
from support.models import edit_forward, in_parts
from support.sweep import in_sweep
from torch import nn
from transformers.models.inkling2 import Inkling2TextConfig, modeling_inkling2

import torch_moe_mps
from torch_moe_mps.transformers.families.inkling2 import relative_bias
from torch_moe_mps.transformers.families.inkling2.relative_bias import BiasOfStates, makes_relative_bias
from torch_moe_mps.transformers.install import rewrite

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_inkling2, "Inkling2RelativePositionBias"), reason="transformers 5.24 has the class"
)


def projected(scales: bool = True) -> nn.Module:
    config = Inkling2TextConfig(hidden_size=8, d_rel=3, log_scaling_n_floor=4)
    made = modeling_inkling2.Inkling2RelativePositionBias(config, 4, 6, scales)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


@torch.no_grad()
def test_elements():
    """By distance they are the numbers that the module's own code has for its pairs of tokens and keys."""
    own, ours = projected(), projected()
    ours.load_state_dict(own.state_dict())
    rewrite(ours)
    hidden, positions = torch.randn(2, 5, 8), torch.arange(7, 12)[None]
    distance = positions.mT - torch.arange(2, 12)
    made, expected = ours(hidden, distance, positions), own(hidden, distance, positions)
    assert type(made) is BiasOfStates and made.shape == expected.shape and made.dtype == expected.dtype
    for token, away in ((0, 0), (2, 3), (4, 5)):
        by_distance = made.by_distance(token, token + 1)[:, 0, :, away]
        torch.testing.assert_close(by_distance, expected[:, :, token, token + 5 - away])
    assert torch.equal(torch.where(torch.tensor(True), made, 0.0), expected)
    assert type(ours(hidden, distance[:4], positions)) is torch.Tensor  # own code


def test_a_wider_module_stays():
    wider = projected(scales=False)
    assert makes_relative_bias(wider)
    wider.rel_extent = 7
    assert not makes_relative_bias(wider)


@pytest.mark.parametrize(
    ("change", "by"),
    [
        ("(relative_distance < 0) | (relative_distance >= self.rel_extent)", "relative_distance < 0"),
        ("self.norm(relative_states, position_ids)", "self.norm(relative_states, position_ids + 1)"),
        ("self.norm(relative_states, position_ids)", "2 * self.norm(relative_states, position_ids)"),
        ("self.linear(hidden_states)", "self.linear(2 * hidden_states)"),
        ("self.num_heads, -1)", "-1, self.num_heads).mT"),
    ],
)
def test_another_formula_stays(change, by):
    edited = projected()
    assert makes_relative_bias(edited)
    edit_forward(edited, change, by)
    assert not makes_relative_bias(edited)


@pytest.mark.parametrize("at_once", in_sweep((1, 2**30), (1,)))
def test_prompts_and_tokens(simulated, at_once, monkeypatch):
    """Queries and biases grow with the logarithm of the position; prompts in one piece and token by token."""
    monkeypatch.setattr(relative_bias, "MOST_BYTES", at_once)
    model = tiny_models.tiny_model("inkling2", log_scaling_n_floor=4).to("mps").eval()
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1)).to("mps")
    expected = in_parts(model, ids, 3, 1)[0]
    torch_moe_mps.accelerate(model)
    made, elements = [], BiasOfStates.elements
    monkeypatch.setattr(BiasOfStates, "elements", lambda bias: made.append(bias) or elements(bias))
    with simulated.trace() as commands:
        torch.testing.assert_close(in_parts(model, ids, 3, 1)[0], expected, rtol=1e-4, atol=1e-4)
    kernels = [line for line in commands if line.startswith("attention_relative")]
    calls = 8 + 3 + 1 if at_once == 1 else 3
    assert not made and len(kernels) == calls * model.config.get_text_config().num_hidden_layers
    shown = torch.ones(2, 1, 12, 12, dtype=torch.bool, device="mps").tril()
    shown[:, :, :, 1:3] = False
    shown = torch.where(shown, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        ours = model(ids, attention_mask=shown).logits
        torch_moe_mps.restore(model)
        torch.testing.assert_close(ours, model(ids, attention_mask=shown).logits, rtol=1e-4, atol=1e-4)
    assert made
