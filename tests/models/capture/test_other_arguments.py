"""Tokens of models whose forward names its cache otherwise."""

import pytest
import torch
from support.models import prompt
from support.sweep import in_sweep
from support.tiny_models import tiny_model

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of


@pytest.mark.parametrize("architecture", in_sweep(("mamba", "mamba2", "falcon_mamba"), ("mamba2",)))
@torch.no_grad()
def test_mamba(architecture, simulated):
    """Captured, with the tokens and logits of the model's own code."""
    model = tiny_model(architecture)
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(prompt(), **given)
    torch_moe_mps.accelerate(model, capture=True)
    result = model.generate(prompt(), **given)
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)
    captures = captures_of(model)
    assert captures is not None and captures.programs, str(captures)
