"""Libraries that a release has compiled: taken for the source that they were made of, and for no other."""

import json
import shutil

import pytest
import torch
from support.processes import REPOSITORY, forked

from torch_moe_mps._extension import SHADERS

# rms_norm of ones in each dtype, from these shaders.
RUN = """
    import json, sys
    import torch
    from support.simulated import install
    install()
    torch.ops.moe_mps._set_shader_directory(sys.argv[1])
    ones = [torch.ones(1, 64, dtype=getattr(torch, name)).to("mps") for name in sys.argv[2:]]
    print(json.dumps([torch.ops.moe_mps.rms_norm(x, x[0], norm_eps=0.0)[0, 0].item() for x in ones]))
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
    return json.loads(forked(RUN, str(shaders), *dtypes, **variables).splitlines()[-1])


def test_they_are_taken_for_their_source_alone(simulated, shaders):
    """One that Metal does not read, and one of another source, leave the source to be compiled."""
    names = torch.ops.moe_mps._library_file
    (shaders / "compiled" / names("norms_f16")).write_text("cut off")
    other = names("norms_bf16")[:-10] + "0.metallib"
    (shaders / "compiled" / names("norms_bf16")).rename(shaders / "compiled" / other)
    assert results(shaders, "float32", "float16", "bfloat16") == [2, 1, 1]


BOUND = """
    import json
    import torch
    from torch_moe_mps._extension import SHADERS
    from support.simulated import install
    install()
    ops = torch.ops.moe_mps
    ops._set_shader_directory(str(SHADERS), 2)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    rows = [torch.full((1, 64), 2.0, dtype=dtype).to("mps") for dtype in dtypes]
    values = [ops.rms_norm(x, x[0], norm_eps=0.0)[0, 0].item() for x in rows]
    kept = [name for name in ops._libraries() if ops._is_built(name)]
    again = ops.rms_norm(rows[0], rows[0][0], norm_eps=0.0)[0, 0].item(), ops._is_built("norms_f32")
    names = ops._pipelines("norms_f32")
    built = [ops._is_built(name) for name in ("norms_f32", "norms_f16")]
    print(json.dumps([values, kept, again, len(names) > 0, *built]))
"""


def test_so_many_libraries_are_kept(simulated):
    """The oldest is released; its kernels go on, and for another one it is built again."""
    values, kept, again, has_kernels, *built = json.loads(forked(BOUND).splitlines()[-1])
    assert values == [2, 2, 2] and {*kept} == {"norms_bf16", "norms_f16"}
    assert again == [2, False] and has_kernels and built == [True, False]


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
