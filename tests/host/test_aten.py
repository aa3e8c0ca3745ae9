"""Operators of torch's own that answers and training run on mps: torch has a kernel for each."""

import pytest
import torch
from support import tiny_models
from support.sweep import in_sweep

import torch_moe_mps

VERSIONS = ("2.15", "2.14", "2.13")


@pytest.mark.slow("answers and a step of training")
@pytest.mark.parametrize("version", in_sweep(VERSIONS, VERSIONS[:1]))
@pytest.mark.parametrize(
    "architecture", in_sweep(["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"], ["qwen3_moe"])
)
def test_torch_has_a_kernel_for_each(architecture, version, simulated):
    """As its wheels for macOS say; scripts/macos/aten_table reads them."""
    model = tiny_models.tiny_model(architecture).to("mps")
    torch_moe_mps.accelerate(model)
    ids = torch.arange(1, 9, device="mps")[None]
    with simulated.torch_version(version):
        simulated.unknown_aten()
        for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
            model.generate(ids, max_new_tokens=3, pad_token_id=0, **settings)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters()).step()
        assert not simulated.unknown_aten()
