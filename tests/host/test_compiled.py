"""Libraries that a release has compiled: taken for the source that they were made of, and for no other."""

import json
import shutil

import pytest
import torch
from support.processes import REPOSITORY, python

from torch_moe_mps._extension import SHADERS

# rms_norm of ones in each dtype, from these shaders.
RUN = """
    import json, sys
    from pathlib import Path
    import torch
    from torch_moe_mps import _extension
    from support.simulated import install
    _extension.SHADERS = Path(sys.argv[1])
    install()
    ones = [torch.ones(1, 64, dtype=getattr(torch, name)).to("mps") for name in sys.argv[2:]]
    print(json.dumps([torch.ops.moe_mps.rms_norm(x, x[0], 0.0)[0, 0].item() for x in ones]))
"""


@pytest.fixture
def shaders(tmp_path):
    """A copy whose compiled libraries give twice as much, in files that stand for Metal's."""
    copy = shutil.copytree(REPOSITORY / "torch_moe_mps" / "shaders", tmp_path / "shaders")
    (copy / "compiled").mkdir()
    for dtype in ("f32", "f16", "bf16"):
        source = torch.ops.moe_mps._library_source(f"norms_{dtype}")
        assert "precise::rsqrt(" in source
        twice = source.replace("precise::rsqrt(", "2.0f * precise::rsqrt(")
        name = torch.ops.moe_mps._library_file(f"norms_{dtype}")
        (copy / "compiled" / name).write_text(f"simulated metallib\n{twice}")
    return copy


def results(shaders, *dtypes: str, **variables: str) -> list[float]:
    return json.loads(python(RUN, str(shaders), *dtypes, **variables).splitlines()[-1])


def test_they_are_taken_for_their_source_alone(simulated, shaders):
    """One that Metal does not read, and one of another source, leave the source to be compiled."""
    names = torch.ops.moe_mps._library_file
    (shaders / "compiled" / names("norms_f16")).write_text("cut off")
    other = names("norms_bf16")[:-10] + "0.metallib"
    (shaders / "compiled" / names("norms_bf16")).rename(shaders / "compiled" / other)
    assert results(shaders, "float32", "float16", "bfloat16") == [2, 1, 1]


def test_their_name_follows_the_source(simulated, shaders):
    name = torch.ops.moe_mps._library_file
    before = name("norms_f32"), name("rope_f32")
    header = shaders / "norms.h"
    header.write_text(header.read_text().replace("rsqrt(", "rsqrt( "))
    torch.ops.moe_mps._set_shader_directory(str(shaders))
    try:
        assert name("norms_f32") != before[0] and name("rope_f32") == before[1]
    finally:
        torch.ops.moe_mps._set_shader_directory(str(SHADERS))
