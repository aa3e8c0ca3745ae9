"""Checkpoints that version 0.2 wrote load as they did there.

Each folder has what `save_pretrained` wrote, and in expected.st the logits that 0.2 gave in float32.
"""

import pytest
import torch
from safetensors.torch import load_file
from support.processes import REPOSITORY

import torch_moe_mps
from torch_moe_mps.quantization import Format
from torch_moe_mps.transformers.interface import experts_of, formats_of
from torch_moe_mps.transformers.linears import QuantizedLayer

FOLDERS = REPOSITORY / "tests/support/data/checkpoints_0_2"


@pytest.mark.parametrize(
    ("name", "experts", "layers"),
    [
        ("experts", [Format(4, 32)] * 2, {}),
        (
            "mixed",
            [Format(4, 32), Format(mode="mxfp8")],
            {"self_attn.q_proj": Format(4, 32), "self_attn.k_proj": Format(8, 32), "lm_head": Format(6, 32)},
        ),
        ("mxfp4", [Format(mode="mxfp4")] * 2, {}),
    ],
)
def test_checkpoints_of_0_2(name, experts, layers):
    expected = load_file(FOLDERS / name / "expected.st")
    model = torch_moe_mps.from_pretrained(FOLDERS / name, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=expected["ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5)
    (module,) = experts_of(model).values()
    assert [*formats_of(module).values()] == experts
    found = {name: layer.format for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    for end, format in layers.items():
        assert {f for name, f in found.items() if name.endswith(end)} == {format}
    assert not any(name.endswith("o_proj") for name in found) and bool(found) == bool(layers)
