"""The Metal libraries that accelerate() compiles."""

import pytest
import torch
from support import tiny_models
from support.processes import python

import torch_moe_mps
from torch_moe_mps.transformers.compiling import libraries_of

FIRST_TOKEN = """
import sys
from support.simulated import install
install()
import torch
from support import tiny_models
import torch_moe_mps
built = lambda: {name for name in torch.ops.moe_mps._libraries() if torch.ops.moe_mps._is_built(name)}
bits = int(sys.argv[1]) or None
with tiny_models.groups_of_32():
    model = tiny_models.tiny_model("qwen3_moe", torch.float16).to("mps")
report = torch_moe_mps.accelerate(model, bits=bits, group_size=32 if bits else None)
before = built()
assert report.compiled in str(report)
with torch.no_grad():
    for tokens in (1, 40):
        model(torch.arange(tokens, device="mps")[None])
print(before == built(), *sorted(before))
"""


@pytest.mark.parametrize(
    ("bits", "experts"),
    [pytest.param(0, "experts_f16", marks=pytest.mark.sweep), (4, "quantized_affine4_32_f16")],
)
def test_nothing_compiles_in_the_first_token(simulated, bits, experts):
    """A float16 model compiles nothing for bfloat16, and of the weights' formats its own alone."""
    same, *built = python(FIRST_TOKEN, str(bits)).splitlines()[-1].split()
    assert same == "True"
    assert experts in built and {"routing_f16", "routing_f32", "norms_f16", "bucket_i32"} <= set(built)
    assert not [name for name in built if name.endswith("_bf16")]
    assert [name for name in built if name.startswith(("experts", "quantized"))] == [experts]


def test_a_model_elsewhere_compiles_nothing(capfd):
    report = torch_moe_mps.accelerate(tiny_models.tiny_model("qwen3_moe"))
    assert report.compiled is None and "compiled" not in capfd.readouterr().err


def test_libraries_of_a_model_without_experts(simulated):
    assert libraries_of(torch.nn.Linear(4, 4, device="mps")) == []
