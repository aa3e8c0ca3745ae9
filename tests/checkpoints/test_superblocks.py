"""Models whose weights are quantised to ggml's types with integers as scales."""

import pytest
import torch
from support.models import assert_close, output, prompt, tiny

import torch_moe_mps
from torch_moe_mps.models.modules.linears import formats_in

WIDE = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
RECIPE = {"mode": "q4_k", "linear_bits": "same", "overrides": {"experts.down_proj": {"mode": "iq4_xs"}}}


@pytest.mark.sweep
def test_in_place_while_it_is_loaded_and_stored(tmp_path):
    """The same codes by importance, and the logits of the dense model within what 4 bits lose."""
    model = tiny("qwen3_moe", **WIDE)
    expected = output(model, prompt())
    model.save_pretrained(tmp_path / "dense")
    importance = torch_moe_mps.collect_importance(model, prompt(1, 600)[0], progress=False)
    report = torch_moe_mps.accelerate(model, importance=importance, **RECIPE).quantization
    entries = [entry for own in report.modules.values() for entry in own]
    assert {str(entry.format) for entry in entries} >= {"q4_k", "iq4_xs"}
    assert all(entry.error < 0.1 for entry in entries)
    model.save_pretrained(tmp_path / "saved")
    streamed = torch_moe_mps.from_pretrained(str(tmp_path / "dense"), importance=importance, **RECIPE)
    plain = torch_moe_mps.from_pretrained(str(tmp_path / "dense"), **RECIPE)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path / "saved"))
    state = model.state_dict()
    for each in (streamed, loaded):
        own = each.state_dict()
        assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in state)
        assert_close(output(each, prompt()), output(model, prompt()), 1e-4)
    assert any(not torch.equal(other, state[name]) for name, other in plain.state_dict().items())
    assert_close(output(model, prompt()), expected, 0.3)


def test_columns_that_are_no_multiple_of_32():
    """Experts are refused before anything changes; a linear layer stays dense, and the report says why."""
    model = tiny("qwen3_moe", **WIDE | {"moe_intermediate_size": 48})
    expected = (
        r"^moe_mps::quantize: model.layers.0.mlp.experts.down_proj must be of an input dimension that is a "
        r"multiple of 256 for q4_k, got 48$"
    )
    with pytest.raises(ValueError, match=expected):
        torch_moe_mps.accelerate(model, mode="q4_k")
    assert not any(formats_in(module) for module in model.modules())
    model = tiny("qwen3", hidden_size=256, intermediate_size=48, num_hidden_layers=1)
    report = torch_moe_mps.accelerate(model, mode="q4_k").quantization
    assert report.skipped["model.layers.0.mlp.down_proj"] == "its input dimension 48 is no multiple of 256"
    assert "model.layers.0.mlp.up_proj" in report.modules
