"""When matmuls run on tensor units: plans and machines; and that mistakes in the kernel are found."""

import json
import re

import pytest
import torch
from measured.air import tensor_units as air
from support import tiny_models
from support.pinned import assert_pinned
from support.processes import forked, python
from support.quantized_layers import check_layer, check_linear

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps._extension import use_of_tensor_units
from torch_moe_mps._versions import TENSOR_UNITS, dotted
from torch_moe_mps.selfcheck import tensor_units, units


@pytest.fixture
def m5(simulated, monkeypatch):
    """The simulator as a Mac with tensor units."""
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5 Max")
    torch.ops.moe_mps._plan_for(0)
    yield simulated
    torch.ops.moe_mps._plan_for(0)
    for name in torch.ops.moe_mps._libraries(tensor_units=True):
        torch.ops.moe_mps._allow_tensor_units(name, False)


@pytest.mark.pinned
def test_plan(simulated):
    lines = []
    for tokens in (8, 255, 256, 1024):
        plan = torch.ops.moe_mps._plan(tokens, 8, 128, 2048, 768, tensor_units=True)
        lines += [f"T {tokens}, 8 of 128 experts: {line}" for line in plan]
    for tokens in (15, 16, 63, 64, 512):
        for rows, gated in ((2560, False), (12288, True)):
            plan = torch.ops.moe_mps._plan_linear(tokens, rows, gated, cores=40, tensor_units=True)
            lines.append(f"T {tokens}, {rows} rows{', gated' * gated}: {plan}")
    assert_pinned("plans", "tensor units", "\n".join(lines) + "\n")


def kernels_of(simulated, tokens=33, format="affine4_64", dtype=torch.float16) -> list[str]:
    with simulated.trace() as commands:
        check_linear("mps", (tokens, 128, 40), format, dtype, 0)
    return [line.split()[0] for line in commands if " grid " in line]


def test_a_machine_without_units_compiles_nothing_for_them(simulated, monkeypatch):
    library = "tensor_units_dense_bf16"
    was_built = torch.ops.moe_mps._is_built(library)  # by another test
    for gpu, macos, reason in (
        ("Apple M4 Max", "26.4", "Apple M4 Max has none, which the M5 and later have"),
        ("Apple M4 Max", "15.7", "they need macOS 26.2 or newer"),
        ("Apple M5", "26.0", ""),
    ):
        monkeypatch.setenv("SIMULATED_GPU", gpu)
        monkeypatch.setenv("SIMULATED_MACOS", macos)
        assert tensor_units.why_not() == reason
    monkeypatch.setenv("SIMULATED_GPU", "Apple M4 Max")
    model = tiny_models.tiny_model("qwen3_moe", torch.float16).to("mps")
    report = torch_moe_mps.accelerate(model)
    assert report.tensor_units == "tensor units: off: Apple M4 Max has none, which the M5 and later have"
    torch.ops.moe_mps._plan_for(0)
    try:
        assert kernels_of(simulated) == ["gemm16_split_affine4_64_f16"]
    finally:
        torch.ops.moe_mps._plan_for(0)
    assert torch.ops.moe_mps._is_built(library) == was_built


def test_an_older_macos_than_they_need_is_named(simulated, monkeypatch):
    """The host knows Metal 4 alone, which came before; both give the same limit."""
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5")
    for macos, reason in (
        ((26, 1, 0), "they need macOS 26.2 or newer, this is 26.1"),
        ((26, 2, 0), ""),
        ((27, 0, 0), ""),
    ):
        monkeypatch.setattr(units, "macos", lambda macos=macos: macos)
        assert tensor_units.why_not() == reason
    monkeypatch.setenv("SIMULATED_MACOS", "15")
    needed = f"they need macOS {dotted(TENSOR_UNITS)} or newer"
    assert torch.ops.moe_mps._why_no_tensor_units() == needed


def test_only_what_is_allowed(m5):
    """One library at a time; nothing else changes, and float32 never uses them."""
    before = kernels_of(m5)
    torch.ops.moe_mps._allow_tensor_units("tensor_units_affine4_64_f16", True)
    assert kernels_of(m5) == ["gemm32_tensor_affine4_64_f16"]
    assert kernels_of(m5, tokens=15) == ["gemm16_split_affine4_64_f16"]
    assert kernels_of(m5, dtype=torch.bfloat16) == ["gemm16_split_affine4_64_bf16"]
    assert kernels_of(m5, dtype=torch.float32) == ["gemm16_split_affine4_64_f32"]
    torch.ops.moe_mps._allow_tensor_units("tensor_units_affine4_64_f16", False)
    assert kernels_of(m5) == before


def test_one_matrix_on_units_and_one_not(m5):
    """The tiles fit both kernels."""
    torch.ops.moe_mps._allow_tensor_units("tensor_units_mxfp4_f16", True)
    formats = ("affine4_64", "mxfp4")
    for first, second in (formats, formats[::-1]):
        with m5.trace() as commands:
            check_layer("mps", (200, 1, 3, 64, 64), first, torch.float16, 0, down_format=second)
        kernels = {line.split()[0] for line in commands if line.startswith("gemm")}
        assert kernels == {"gemm32_tensor_mxfp4_f16", "gemm32_affine4_64_f16"}


def test_the_environment(monkeypatch, simulated):
    monkeypatch.delenv(_environment.TENSOR_UNITS, raising=False)
    assert use_of_tensor_units() == "auto"
    for text in ("0", "1", "auto"):
        monkeypatch.setenv(_environment.TENSOR_UNITS, text)
        assert use_of_tensor_units() == text
    for text in ("", "yes", "2"):
        monkeypatch.setenv(_environment.TENSOR_UNITS, text)
        with pytest.raises(ValueError, match=f"{_environment.TENSOR_UNITS} must be 0, 1 or auto, got"):
            use_of_tensor_units()
        with pytest.raises(ValueError, match="_set_tensor_units: use must be 0, 1 or auto, got"):
            torch.ops.moe_mps._set_tensor_units(text)


FORCED = """
import os, sys
from support.simulated import install
install()
import torch
from support.quantized_layers import check_linear
import simulator
for os.environ["SIMULATED_MACOS"] in ("15", "26"):
    with simulator.trace() as commands:
        try:
            check_linear("mps", (33, 64, 40), "affine4_64", torch.float16, 0)
        except RuntimeError as error:
            print(error, end=" ")
    print(*(line.split()[0] for line in commands if line.startswith("gemm")))
"""
TOO_OLD = "needs macOS 26.2 or newer; without MOE_MPS_TENSOR_UNITS=1 it is not used"


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("1", (TOO_OLD, "gemm32_tensor_affine4_64_f16")),
        pytest.param("0", ("gemm16_split_affine4_64_f16",) * 2, marks=pytest.mark.sweep),
    ],
)
def test_forced(simulated, monkeypatch, use, expected):
    """On any GPU, unchecked; if macOS is too old, an error says so, and nothing else is computed."""
    monkeypatch.setenv(_environment.TENSOR_UNITS, use)
    for text, line in zip(expected, python(FORCED).splitlines(), strict=True):
        assert text in line


def test_operands_have_precedents(simulated):
    """Public kernels have such operands; simulator/tests/package/test_air.py looks at AIR of Apple's."""
    called = {name for library in air.LIBRARIES[:2] for name in air.ours(library).functions()}
    assert called == air.PRECEDENTS.keys()


# A mistake in the kernel, and what is found.
FAULTS = [
    ("      threadgroup_barrier(mem_flags::mem_threadgroup);\n      multiply.run", "      multiply.run",
     "reads .* wrote with no barrier .*matmul2d::run"),
    ("sums.get_capacity(); ++i) sums[i] = 0.0f", "0; ++i) sums[i] = 0.0f", "wrong"),
    ("        if (column < params.inputs) {\n          octet", "        {\n          octet",
     "out of bounds|reads .* past|wrong"),
    ("  sums.store(to);", "  for (ushort i = 0; i < sums.get_capacity() - 1; ++i) "
     "memory[thread_index * (sums.get_capacity() - 1) + i] = sums[i];", "wrong"),
    ("      threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles before these have been read\n", "",
     "writes .* which several threads read with no barrier"),
    ("  threadgroup_barrier(mem_flags::mem_threadgroup);  // what was there has been read\n", "",
     "writes .* which several threads read with no barrier"),
    ("  sums.store(to);\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n", "  sums.store(to);\n",
     "reads .* which thread .* wrote with no barrier|reads uninitialised"),
]  # fmt: skip

FAULTY = """
import json, re, shutil, sys
from pathlib import Path
import torch
from simulator.errors import SimulatorError
from support.oracles_experts import group_of
from support.quantized_layers import ALL_FORMATS, check_linear
from torch_moe_mps._extension import SHADERS
torch.ops.moe_mps._set_tensor_units("1")
torch.ops.moe_mps._plan_for(1)
shape = json.loads(sys.argv[3])
for number, (good, bad, _) in enumerate(json.loads(sys.argv[1])):
    shaders = Path(sys.argv[2], str(number))
    shutil.copytree(SHADERS, shaders)
    file = shaders / "matmul" / "tensor_units.h"
    text = file.read_text()
    assert text.count(good) == 1, good
    file.write_text(text.replace(good, bad))
    torch.ops.moe_mps._set_shader_directory(str(shaders))
    format = [f for f in ALL_FORMATS if group_of(f) <= 32][number]
    try:
        check_linear("mps", shape, format, torch.float16, 0)
        print("nothing")
    except (AssertionError, SimulatorError, RuntimeError) as error:
        print(re.sub(r"\\s+", " ", str(error)))
"""


@pytest.mark.parametrize(
    ("faults", "shape"),
    [
        (FAULTS[:4], (18, 160, 69)),
        pytest.param(FAULTS[4:], (18, 160, 69), marks=pytest.mark.sweep),
    ],
)
def test_mistakes_in_the_kernel_are_found(simulated, tmp_path, faults, shape):
    found = forked(FAULTY, json.dumps(faults), tmp_path, json.dumps(shape)).splitlines()
    for (_, bad, expected), line in zip(faults, found, strict=True):
        assert re.search(expected, line), (bad, line)
