"""accelerate() on a simulated M5: tensor units are used if they agree with the CPU, and are reported."""

import ctypes
import json
import warnings

import pytest
import torch
from support import tiny_models

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps._environment import TENSOR_UNITS
from torch_moe_mps.commands import check, main
from torch_moe_mps.selfcheck import calls, once, tensor_units
from torch_moe_mps.transformers import self_check

LIBRARY = "tensor_units_affine4_32_f16"
IDS = torch.arange(1, 41)[None]


@pytest.fixture
def m5(simulated, monkeypatch, tmp_path):
    """A simulated M5 that has checked nothing yet; of the operators' checks nothing is run."""
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5 Max")
    monkeypatch.setenv(_environment.CHECK, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(once, "SECONDS", 600.0)
    monkeypatch.setattr(once, "checks_of", lambda subjects: [])
    monkeypatch.setattr(tensor_units, "SIZES", tensor_units.SIZES[:1])
    yield simulated
    self_check.reset()
    for name in torch.ops.moe_mps._libraries(tensor_units=True):
        torch.ops.moe_mps._allow_tensor_units(name, False)


def accelerated(bits: int | None = 4, dtype: torch.dtype = torch.float16, **options) -> tuple:
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", dtype).to("mps")
    report = torch_moe_mps.accelerate(model, bits=bits, group_size=32 if bits else None, **options)
    return model, report


def kernels(simulated, model) -> set[str]:
    with simulated.trace() as commands, torch.no_grad():
        logits = model(IDS.to("mps")).logits.cpu()
    assert logits.isfinite().all()
    return {line.split()[0] for line in commands if line.startswith("gemm")}


def faulty(kernel: str):
    """Runs a dispatch, but for kernels of this name, which leave what was in memory."""
    from simulator import shaderlib

    def run(dispatch) -> None:
        if kernel not in dispatch.kernel.contents.name.decode():
            shaderlib.execute(dispatch)

    return run


def test_they_are_used_once_checked(m5, monkeypatch):
    """And remembered: the second time nothing is compared."""
    model, report = accelerated()
    assert report.tensor_units == "tensor units: on for affine4_32 in float16"
    assert report.tensor_units in str(report) and tensor_units.decided() in report.tensor_units
    assert "gemm32_tensor_affine4_32_f16" in kernels(m5, model)
    monkeypatch.setattr(once, "first_fault", None)
    torch.ops.moe_mps._allow_tensor_units(LIBRARY, False)
    assert accelerated()[1].tensor_units == report.tensor_units


def test_units_that_compute_something_else(m5):
    """One line says so, and the matmuls run as on other GPUs."""
    with m5.intercepted(faulty("_tensor_")), pytest.warns(UserWarning, match="on tensor units") as told:
        model, report = accelerated()
    (line,) = [str(warning.message) for warning in told if "on tensor units" in str(warning.message)]
    assert line.startswith("torch_moe_mps: on this machine (Apple M5 Max, macOS none, torch ")
    assert "moe_experts_quantized (float16, affine4_32 on tensor units) differs (largest error inf)" in line
    assert "`torch-moe-mps check` writes a report" in line and f"{TENSOR_UNITS}=0" in line
    assert report.tensor_units.startswith(
        "tensor units: off for affine4_32 in float16: _moe_experts_quantized "
    )
    assert kernels(m5, model) and not [name for name in kernels(m5, model) if "tensor" in name]


def test_another_result_the_second_time(m5):
    """Too close to be wrong, as where threads race."""
    from simulator import shaderlib

    seen = 0

    def run(dispatch) -> None:
        nonlocal seen
        shaderlib.execute(dispatch)
        if "_tensor_" in dispatch.kernel.contents.name.decode():
            seen += 1
            bits = ctypes.c_uint16.from_address(dispatch.buffers[6].data)
            bits.value ^= seen % 3 == 0

    with m5.intercepted(run):
        fault = once.first_fault(tensor_units.check_of(LIBRARY))
    assert seen > 0 and fault is not None and fault.kind == "gives another result the second time"


def test_a_library_that_does_not_compile(m5, monkeypatch):
    """As with the first versions of Apple's header, which have no bfloat."""
    monkeypatch.setenv("SIMULATED_MACOS", "15")
    for module in (tensor_units, self_check):
        monkeypatch.setattr(module, "why_not", lambda: "")
    with pytest.warns(UserWarning, match="does not compile|needs macOS 26"):
        model, report = accelerated(6, torch.bfloat16)  # which no other test has compiled in this process
    assert "off for affine6_32 in bfloat16" in report.tensor_units
    assert not [name for name in kernels(m5, model) if "tensor" in name]


def test_no_check_no_units(m5, monkeypatch):
    line = f"tensor units: off: not checked; {TENSOR_UNITS}=1 uses them all the same"
    assert accelerated(check=False)[1].tensor_units == line
    monkeypatch.setattr(once, "SECONDS", -1.0)
    late = accelerated()[1].tensor_units
    assert late == "tensor units: no time to check affine4_32 in float16, which is done the next time"
    assert accelerated(None, torch.float32)[1].tensor_units == (
        "tensor units: off: there are no weights that they take, with activations of 16 bits"
    )
    monkeypatch.setenv(TENSOR_UNITS, "0")
    assert accelerated()[1].tensor_units == f"tensor units: off: {TENSOR_UNITS}=0"
    monkeypatch.setenv(TENSOR_UNITS, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = accelerated(check=False)[1]
    assert (
        report.tensor_units == f"tensor units: on for affine4_32 in float16 ({TENSOR_UNITS}=1, not checked)"
    )


def test_a_model_elsewhere_says_nothing_of_units():
    assert torch_moe_mps.accelerate(tiny_models.tiny_model("qwen3_moe")).tensor_units is None


@pytest.mark.parametrize("is_faulty", [False, True])
def test_the_command(m5, monkeypatch, tmp_path, capsys, is_faulty):
    """`torch-moe-mps check` compares every library, and reports a fault of what the package does without."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "check_model", lambda *arguments: [])
    monkeypatch.setattr(check, "never_launched", lambda kernels: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["norms_f16"])
    monkeypatch.setattr(
        tensor_units, "libraries", lambda dtypes, formats: [LIBRARY, "tensor_units_dense_f16"]
    )
    command = ["check", "--dtype", "float16", "--format", "affine4_32"]
    with m5.intercepted(faulty("_tensor_dense_" if is_faulty else "nothing")):
        assert main(command) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "moe_mps_report.json").read_text())
    count = "1 of 2" if is_faulty else "2 of 2"
    assert f"Tensor units: {count} libraries agree with the CPU" in out
    assert report["tensor_units"] == f"{count} libraries agree with the CPU"
    assert [each["format"] for each in report["off"]] == ["dense on tensor units"] * is_faulty
    assert report["failures"] == []
    off = "All right; off: _moe_experts (float16, dense on tensor units)."
    assert (off if is_faulty else "All built, all equal.") in out


def test_libraries_of_formats(simulated):
    format = calls.FORMATS[0]
    names = tensor_units.libraries([torch.float16], [format])
    assert names == [f"tensor_units_{name}_f16" for name in ("dense", str(format))]
    assert len(tensor_units.libraries(calls.DTYPES, calls.FORMATS)) == 2 * (1 + 49)
