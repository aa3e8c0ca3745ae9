"""The compiled library: how it is loaded, what it reports, what it checks."""

import itertools
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from support.processes import forked, python

from torch_moe_mps import _extension
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._checks import Check
from torch_moe_mps.ops._samples import packet
from torch_moe_mps.quantization import quantize


def test_buffers_beside_each_other_do_not_overlap(device):
    """On mps an address is that of a buffer object; two objects are closer together than their buffers are
    long."""
    tensors = [torch.zeros(2**20, device=device) for _ in range(8)]
    for written, read in itertools.permutations(tensors, 2):
        Check("an_operator").all_apart(["residual_"], {"residual_": written, "slots": read})
    with pytest.raises(ValueError, match="free of overlap with slots"):
        Check("an_operator").all_apart(["residual_"], {"residual_": tensors[0][1:], "slots": tensors[0][:-1]})


WITHOUT_EXTENSION = """
import sys, warnings
import torch
from simulator import install  # without the package's own host code
install()
from torch_moe_mps.ops._samples import copies, packet, sample_arguments
from torch_moe_mps.ops import OPERATORS
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in OPERATORS:
        expected = copies(sample_arguments(name, "cpu", torch.float32))
        arguments = copies(sample_arguments(name, "mps", torch.float32))
        torch.testing.assert_close(packet(name)(**arguments), packet(name)(**expected), check_device=False)
        for written in (argument for argument in arguments if argument.endswith("_")):
            torch.testing.assert_close(arguments[written].cpu(), expected[written])
print(*(warning.message for warning in caught), sep="\\n")
"""


def test_references_run_on_any_device():
    """Also on mps, where the extension is missing: the test below runs them."""
    keys = ("CPU", "CompositeExplicitAutograd")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in OPERATORS for key in keys if not has_kernel(f"moe_mps::{name}", key)] == []


@pytest.mark.sweep  # each reference in a process of its own
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has the extension")
def test_mps_without_the_extension():
    """Every operator runs its reference there, and one warning says so."""
    (warning,) = python(WITHOUT_EXTENSION).splitlines()
    assert warning.startswith("torch_moe_mps: the Metal extension is not loaded")


def test_library_for_another_torch(tmp_path, monkeypatch):
    """It is not loaded into this one, whose classes may differ; the line says what to install."""
    for name in ("_C_torch1_9.so", "_C_torch1_10.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(_extension, "PACKAGE", tmp_path)
    version = re.escape(torch.__version__)
    message = rf"has no Metal kernels for torch {version}, only for 1\.9, 1\.10: "
    message += r"a newer torch-moe-mps may bring them, `.*pip install 'torch==1\.10\.\*'` fits"
    with pytest.warns(UserWarning, match=message):
        assert not _extension.load_extension()
    ours = "_C_torch{}_{}.so".format(*torch.__version__.split("."))
    (tmp_path / ours).touch()
    with pytest.warns(UserWarning, match=f"cannot load {ours} into torch .*; install it again"):
        assert not _extension.load_extension()


IN_A_FRESH_PROCESS = """
import sys
import torch
from simulator import pipeline_limit
from torch_moe_mps.ops._samples import packet, sample_arguments

def run(dtype):
    try:
        packet("fused_norm_add")(**sample_arguments("fused_norm_add", "mps", dtype))
    except RuntimeError as error:
        print(error, "---")

with pipeline_limit(16):
    run(torch.float32)
for shaders, dtype in zip(sys.argv[1:], (torch.float16, torch.bfloat16), strict=True):
    torch.ops.moe_mps._set_shader_directory(shaders)
    run(dtype)
"""


def test_messages_of_pipelines_and_of_the_compiler(simulated, tmp_path):
    """Metal would leave out a dispatch of too many threads without a word. A pipeline's limit is read when it
    is built. A shader that does not compile is named with the line, though its headers are pasted into it;
    a library without functions, which a compiler of macOS 26.5 returned, with their number."""
    shaders, empty = (Path(shutil.copytree(_extension.SHADERS, tmp_path / n)) for n in ("shaders", "empty"))
    (empty / "norms_residual.metal").write_text("#include <metal_stdlib>\n")
    faults = []
    for name in ("norms.h", "norms_residual.metal"):
        source = (shaders / name).read_text()
        (shaders / name).write_text(f"{source}static_assert(false);\n")
        faults.append(f"{name}:{source.count(chr(10)) + 1}:")
    narrow, broken, missing, _ = forked(IN_A_FRESH_PROCESS, shaders, empty).split("---")
    message = "moe_mps: norm_add_f32 takes 96 threads a threadgroup, its pipeline on this GPU at most 16"
    assert narrow.splitlines()[0].strip() == message
    assert broken.strip().startswith("moe_mps: norms_residual_f16 does not compile: ")
    assert all(fault in broken for fault in faults), broken
    message = "moe_mps: no Metal function norm_add_bf16: its library norms_residual_bf16 has 0 functions"
    assert missing.strip().splitlines()[0] == message


def test_a_signature_is_checked_once(simulated, monkeypatch):
    """Later calls do not enter Python, even with calls of another signature in between."""
    checked, check = [], Check.same_device

    def counting(self, **tensors):
        checked.append(tensors)
        check(self, **tensors)

    monkeypatch.setattr(Check, "same_device", counting)
    first, second = (torch.ones(3, columns, device="mps") for columns in (1013, 1019))
    for gate in (first, second, first, second):
        packet("silu_mul_stacked")(gate, gate)
    assert len(checked) == 2


def test_signatures_of_other_shapes_are_told_apart(simulated):
    """With as many elements, and in the other order, after each was seen in a valid call."""
    shapes = ((2, 3), (3, 2), (6,), (1, 6))
    tensors = [torch.ones(shape, device="mps") for shape in shapes]
    for tensor in tensors:
        packet("silu_mul_stacked")(tensor, tensor)
    for gate, up in itertools.permutations(tensors, 2):
        with pytest.raises(ValueError, match="up must be of shape"):
            packet("silu_mul_stacked")(gate, up)


def test_every_argument_is_in_a_signature(simulated):
    """A call that differs from a valid one in a single argument is not taken for it."""
    x, weight = (torch.ones(shape, dtype=torch.float16, device="mps") for shape in ((4, 64), (8, 64)))
    packed, scales, zeros = quantize(weight, 4, 64)
    good = {"x": x, "packed": packed, "scales": scales, "zeros": zeros, "bias": None}
    good |= {"format": "affine4_64"}
    bad = {
        "x": [x[:, :32], x.to(torch.int32), x.cpu()],
        "packed": [packed[:, :4], packed.long(), packed[None], packed[0]],
        "scales": [scales[:4], scales.to(torch.uint8), scales.cpu()],
        "zeros": [None, zeros[:4]],
        "bias": [x[0], x],
        "format": ["affine3_64", "affine4_32", "mxfp4", "affind4_64", ""],
    }
    linear = packet("linear_quantized")
    for argument, values in bad.items():
        for value in values:
            for _ in range(2):
                linear(**good)
            with pytest.raises((TypeError, ValueError, RuntimeError), match="moe_mps::linear_quantized: "):
                linear(**(good | {argument: value}))


def test_layouts_of_one_shape(simulated):
    """A call whose strides or offset differ from those of the call before reads its own memory."""
    wide = torch.arange(8 * 64, dtype=torch.float32).reshape(8, 64) / 64
    on_mps = wide.to("mps")
    layouts = (lambda x: x[:4, :32], lambda x: x[3:7, :32], lambda x: x[:4, ::2], lambda x: x[::2, 32:])
    for first, second in itertools.permutations(layouts, 2):
        for lay in (first, second):
            out = packet("silu_mul_stacked")(lay(on_mps), torch.ones(4, 32, device="mps"))
            gate = lay(wide).double()
            torch.testing.assert_close(out.cpu().double(), gate / (1 + (-gate).exp()), rtol=1e-6, atol=1e-6)
