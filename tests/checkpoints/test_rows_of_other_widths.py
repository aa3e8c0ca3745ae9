"""Formats in blocks of 256 for rows that are no multiples: others, of about the bits of llama.cpp's."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import eager, output, prompt
from support.sweep import covering

import torch_moe_mps
from torch_moe_mps.models.modules.linears import formats_in

# Bits of a value that llama.cpp's types have, which it takes where rows are no multiples of 256.
LLAMA_CPP = {"q2_k": 4.5, "q3_k": 4.5, "iq4_xs": 4.5, "q4_k": 5.5, "q5_k": 6.0, "q6_k": 8.5}


@pytest.mark.parametrize(("architecture", "mode"), covering(("llama", "qwen3_moe"), LLAMA_CPP))
def test_nothing_stays_dense(mode, architecture):
    """In groups of 64, or of 32 where rows are no multiples of 64: at most a bit more than llama.cpp's."""
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture)).bfloat16()
    dense = copy.deepcopy(model)
    alike = {"linear_bits": "same", "embedding_bits": "same"}
    report = torch_moe_mps.accelerate(model, mode=mode, **alike).quantization
    assert not {why for why in report.skipped.values() if "multiple" in why}
    formats = {str(format) for module in model.modules() for format in formats_in(module).values()}
    assert formats and all(format.endswith(("_32", "_64")) for format in formats)
    size = 16 * report.quantized_bytes / report.dense_bytes
    assert LLAMA_CPP[mode] <= size <= LLAMA_CPP[mode] + 1
    expected = output(dense, prompt()).float()
    assert (output(model, prompt()).float() - expected).norm() / expected.norm() < 0.5


def test_rows_of_whole_blocks_keep_the_format():
    model = eager(tiny_models.tiny_model("llama", hidden_size=256, intermediate_size=320))
    torch_moe_mps.accelerate(model, mode="q4_k")
    layer = model.model.layers[0]
    assert str(layer.self_attn.q_proj.format) == "q4_k" and str(layer.mlp.down_proj.format) == "affine5_64"
    assert torch.isfinite(output(model, prompt())).all()
