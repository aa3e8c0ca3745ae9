"""torch.export of accelerated models."""

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, output, prompt
from support.sweep import rows_in_sweep
from torch import nn

import torch_moe_mps


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


EXPORTED = (("glm4_moe", None), ("qwen3_moe", 4), ("gpt_oss", 4))


@pytest.mark.parametrize(("architecture", "bits"), rows_in_sweep(EXPORTED, EXPORTED[2:]))
def test_export_with_a_dynamic_length(architecture, bits):
    """One program for all lengths; its results equal those of the model's own code with the same weights."""
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture, torch.bfloat16))
    options = {} if bits is None else {"bits": bits, "group_size": 32}
    lengths = (5, 40)
    expected = [output(model, prompt(1, length)) for length in lengths]
    torch_moe_mps.accelerate(model, **options)
    if bits is not None:
        expected = [output(model, prompt(1, length)) for length in lengths]
    dynamic = {"ids": {1: torch.export.Dim("length", min=2, max=256)}}
    with torch.no_grad():
        exported = torch.export.export(Logits(model), (prompt(1, 12),), dynamic_shapes=dynamic, strict=False)
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        for length, logits in zip(lengths, expected, strict=True):
            assert_close(exported.module()(prompt(1, length)), logits, 0.05)
    ours = {name.split(".")[1] for name in names if name.startswith("moe_mps.")}
    assert ours >= {
        "moe_router",
        "rms_norm",
        "rope",
        *(["router_logits", "_moe_experts"] if bits is None else []),
        *(["cached_attention"] if architecture == "gpt_oss" else []),
    }
    assert bits is None or {"linear_quantized", "_moe_experts_quantized"} <= ours
