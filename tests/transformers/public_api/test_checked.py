"""accelerate() on a machine whose GPU gets something wrong: the faults are injected into the simulator."""

import contextlib
import ctypes
import json
import warnings

import pytest
import torch
import transformers
from support import tiny_models
from support.processes import forked

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.selfcheck import calls, machine, once
from torch_moe_mps.transformers import self_check

NORM = once.checks_of([calls.Subject("rms_norm", torch.float32)])[:1]
IDS = torch.tensor([[1, 2, 3, 4, 5]])
COMMAND = "`torch-moe-mps check` writes a report"


def one_call(subject):
    """The first of a subject's calls."""
    with contextlib.closing(calls.calls(subject)) as made:
        yield next(made)


@pytest.fixture
def new_machine(simulated, monkeypatch, tmp_path):
    """A machine that has checked nothing yet, and checks an operator by one call."""
    monkeypatch.setenv(_environment.CHECK, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(once, "SECONDS", 600.0)
    monkeypatch.setattr(once, "calls", one_call)
    monkeypatch.setattr(calls, "SIZES", {})
    yield simulated
    self_check.reset()


def tiny() -> torch.nn.Module:
    return tiny_models.tiny_model("qwen3_moe", torch.float32)


def wrong(dispatch, change: float) -> None:
    """Runs a dispatch, and changes the first number that it wrote."""
    from simulator import shaderlib

    shaderlib.execute(dispatch)
    kernel = dispatch.kernel.contents
    written = next(kernel.arguments[i] for i in range(kernel.argument_count) if kernel.arguments[i].writable)
    ctypes.c_float.from_address(dispatch.buffers[written.index].data).value += change


class Fault:
    """Replaces the executor: every dispatch of a kernel whose name starts with `kernel` goes to `run`."""

    def __init__(self, kernel: str, run):
        self.kernel, self.run, self.seen = kernel, run, 0

    def __call__(self, dispatch) -> None:
        from simulator import shaderlib

        if dispatch.kernel.contents.name.decode().startswith(self.kernel):
            self.seen += 1
            self.run(dispatch, self.seen)
        else:
            shaderlib.execute(dispatch)


def wrong_at_one_output(dispatch, seen: int) -> None:
    wrong(dispatch, 1.0)


def another_result_the_second_time(dispatch, seen: int) -> None:
    """Too close to be wrong."""
    wrong(dispatch, 1e-5 if seen % 2 else 0.0)


def ended_with_an_error(dispatch, seen: int) -> None:
    """A command buffer that fails leaves nothing behind. torch does not ask whether one failed."""


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (wrong_at_one_output, "differs (largest error "),
        (another_result_the_second_time, "gives another result the second time (largest error "),
        (ended_with_an_error, "differs (largest error inf)"),
    ],
)
def test_an_operator_that_fails_is_not_used(new_machine, monkeypatch, fault, kind):
    """Its modules keep the model's own code, the others run on operators, and the logits are right."""
    monkeypatch.setenv(CAPTURE, "1")  # captured tokens have operators that no module calls
    model = tiny()
    with torch.no_grad():
        expected = model(IDS).logits
    model.to("mps")
    found = Fault("rope_f32", fault)
    with new_machine.intercepted(found), pytest.warns(UserWarning) as told:
        report = torch_moe_mps.accelerate(model)
    assert found.seen > 0
    lines = [str(warning.message) for warning in told if "on this machine" in str(warning.message)]
    assert len(lines) == 3  # operators that have the kernel
    for line, operator in zip(sorted(lines), ("_rope_attention_", "_rope_cache_", "rope"), strict=True):
        assert line.startswith("torch_moe_mps: on this machine (Simulated Apple GPU, macOS none, torch ")
        assert f") {operator} (float32) {kind}" in line and COMMAND in line
    attention = next(row for row in report.rows if row.cls == "Qwen3MoeAttention")
    assert attention.replaced_by == "cached_attention"
    assert attention.reason == "rope fails the self-check on this GPU"
    assert any(row.kind == "experts" for row in report.replaced)
    assert " operators agree with the CPU on this GPU (" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS.to("mps")).logits.cpu(), expected, rtol=1e-4, atol=1e-4)


WIDE = {"head_dim": 64}


def logits_of(model):
    """Of a prompt and a token, and the cache."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in (IDS, IDS[:, :1]):
            logits = model(ids.to(model.device), **cache_argument(model, cache)).logits
    return logits.cpu(), cache


@pytest.mark.slow("the self-check of a model, with a fault")
@pytest.mark.parametrize(
    ("kernel", "operator", "loads"),
    [
        ("write_cache_quantized", "_write_cache_quantized_", False),
        pytest.param("attention8_64_affine8", "cached_attention", True, marks=pytest.mark.sweep),
    ],
)
def test_keys_and_values_stay_in_16_bits_where_8_are_wrong(
    new_machine, monkeypatch, kernel, operator, loads, tmp_path
):
    """Written or read so; attention over a dense cache runs on the operator all the same."""

    def all_of_it(subject):
        return calls.calls(subject) if subject.operator == operator else one_call(subject)

    monkeypatch.setattr(once, "calls", all_of_it)
    model = tiny_models.tiny_model("qwen3_moe", torch.float32, **WIDE)
    expected, _ = logits_of(model)
    model.save_pretrained(tmp_path)
    found = Fault(kernel, ended_with_an_error)
    with new_machine.intercepted(found), pytest.warns(UserWarning) as told:
        if loads:
            model = torch_moe_mps.from_pretrained(tmp_path, device_map="mps", kv_bits=8)
        else:
            torch_moe_mps.accelerate(model.to("mps"), kv_bits=8)
    assert found.seen > 0
    (line,) = [str(warning.message) for warning in told if "on this machine" in str(warning.message)]
    assert f" {operator} (float32) differs (largest error " in line
    assert "; keys and values stay in 16 bits. " in line
    with new_machine.trace() as encoded:
        logits, cache = logits_of(model)
    assert any(line.startswith("attention") for line in str(encoded).splitlines())
    assert not any(isinstance(layer.keys, QuantizedStates) for layer in cache.layers)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow("the self-check of a model, with a fault")
@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        ("seal_tiles_4", "_seal_tiles_"),
        pytest.param("tiles8_64", "_tiled_attention", marks=pytest.mark.sweep),
    ],
)
def test_keys_and_values_are_held_in_8_bits_where_4_are_wrong(new_machine, monkeypatch, kernel, operator):
    """8 bits are compared next, and are right."""

    def all_of_it(subject):
        return calls.calls(subject) if subject.operator == operator else one_call(subject)

    monkeypatch.setattr(once, "calls", all_of_it)
    model = tiny_models.tiny_model("qwen3_moe", torch.float32, **WIDE).to("mps")
    found = Fault(kernel, ended_with_an_error)
    with new_machine.intercepted(found), pytest.warns(UserWarning) as told:
        torch_moe_mps.accelerate(model, kv_bits=4)
    assert found.seen > 0
    (line,) = [str(warning.message) for warning in told if "on this machine" in str(warning.message)]
    assert f" {operator} (float32) differs (largest error " in line
    assert "; keys and values are held in 8 bits. " in line
    _, cache = logits_of(model)
    assert all(isinstance(layer.keys, QuantizedStates) for layer in cache.layers)


@pytest.mark.parametrize(("kernel", "before"), [("attention8_64_f32", False), ("rope_f32", True)])
def test_keys_and_values_in_8_bits_where_another_operator_fails(new_machine, kernel, before):
    """Asked for in this call, or in one before. Without `cached_attention`, torch's gets them dense."""
    model = tiny_models.tiny_model("qwen3_moe", torch.float32, **WIDE)
    torch_moe_mps.accelerate(model, kv_bits=8)
    expected, _ = logits_of(model)
    torch_moe_mps.restore(model.to("mps"))
    if before:
        torch_moe_mps.accelerate(model, kv_bits=8, check=False)
    with (
        new_machine.intercepted(Fault(kernel, wrong_at_one_output)),
        pytest.warns(UserWarning, match=COMMAND),
    ):
        torch_moe_mps.accelerate(model, **({} if before else {"kv_bits": 8}))
    logits, cache = logits_of(model)
    assert all(isinstance(layer.keys, QuantizedStates) for layer in cache.layers)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_quantised_weights_are_refused_before_anything_changes(new_machine):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", torch.float32).to("mps")
    before = {name: (tensor.data_ptr(), type(tensor)) for name, tensor in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    fault = Fault("embed", ended_with_an_error)
    with (
        new_machine.intercepted(fault),
        pytest.raises(RuntimeError, match=r"weights cannot be used on this machine .* embedding_quantized"),
    ):
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
    assert fault.seen > 0
    assert {name: (t.data_ptr(), type(t)) for name, t in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == classes


def test_what_passed_is_remembered(new_machine, monkeypatch):
    checked_now: list[str] = []
    check = once.first_fault
    monkeypatch.setattr(
        once, "first_fault", lambda what, *rest: (checked_now.append(what.subject), check(what, *rest))[1]
    )

    def accelerated() -> list[str]:
        checked_now.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_moe_mps.accelerate(tiny().to("mps"))
        return list(checked_now)

    first = accelerated()
    assert {"rope", "_moe_experts", "moe_router"} <= set(first) and len(first) == len(set(first))
    assert accelerated() == []
    file = machine.cache_file()
    assert len(json.loads(file.read_text())["passed"]) == len(first)
    for damaged in ("", "[]", '{"passed": [1]}', "\0"):
        file.write_text(damaged)
        assert accelerated() == first
    monkeypatch.setattr(torch, "__version__", torch.__version__ + ".other")
    assert accelerated() == first


def test_a_cache_that_cannot_be_written(new_machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert once.first_failures(NORM) == ({}, set())


def test_what_there_is_no_time_for_is_checked_the_next_time(new_machine, monkeypatch):
    monkeypatch.setattr(once, "SECONDS", -1.0)
    report = torch_moe_mps.accelerate(tiny().to("mps"))
    assert "0 of " in report.checked and "; no time for " in report.checked and "rope" in report.checked
    monkeypatch.setattr(once, "SECONDS", 600.0)
    assert once.first_failures(NORM) == ({}, set())
    monkeypatch.setattr(once, "SECONDS", -1.0)
    assert once.first_failures(NORM) == ({}, set())  # remembered


def test_without_a_check(new_machine, monkeypatch):
    def never(*arguments):
        raise AssertionError("checked")

    monkeypatch.setattr(once, "first_fault", never)
    report = torch_moe_mps.accelerate(tiny().to("mps"), check=False)
    assert report.checked is None
    monkeypatch.setenv(_environment.CHECK, "0")
    assert torch_moe_mps.accelerate(tiny().to("mps")).checked is None
    monkeypatch.setenv(_environment.CHECK, "1")
    assert torch_moe_mps.accelerate(tiny()).checked is None  # not on mps


BROKEN = """
import contextlib, os, shutil, sys, warnings
from pathlib import Path
shaders = Path(sys.argv[1]) / "shaders"
import torch
from torch_moe_mps._extension import SHADERS
shutil.copytree(SHADERS, shaders)
file = shaders / "rope.metal"
file.write_text(file.read_text() + "\\nkernel void broken() { undeclared = 1; }\\n")
from simulator import pipeline_limit
torch.ops.moe_mps._set_shader_directory(str(shaders))
from support import tiny_models
import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.selfcheck import calls, once
def one_call(subject):
    with contextlib.closing(calls.calls(subject)) as made:
        yield next(made)
once.SECONDS, once.calls, calls.SIZES = 600.0, one_call, {}
os.environ.update({_environment.CHECK: "1", "XDG_CACHE_HOME": sys.argv[1]})
# A limit is read when a pipeline is built: these kernels get one before the others are compiled.
with pipeline_limit(16):
    torch.ops.moe_mps._pipelines("norms_f32")
model = tiny_models.tiny_model("qwen3_moe", torch.float32).to("mps")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    report = torch_moe_mps.accelerate(model)
for warning in told:
    print(str(warning.message).partition(") ")[2])
print([row.cls for row in report.rows if row.replaced_by])
with torch.no_grad():
    print(bool(model(torch.tensor([[1, 2, 3]], device="mps")).logits.isfinite().all()))
"""


def test_shaders_that_do_not_compile_and_pipelines_of_few_threads(simulated, tmp_path):
    """Their modules run the model's own code; the experts run on their operator."""
    *lines, classes, finite = forked(BROKEN, tmp_path).splitlines()
    (rope,) = [line for line in lines if line.startswith("rope ")]
    assert rope.startswith("rope (float32) does not compile: moe_mps: rope_f32 does not compile: ")
    assert COMMAND in rope
    norms = [line for line in lines if "its pipeline on this GPU at most 16" in line]
    assert norms and all(" (float32) raises: moe_mps: " in line and COMMAND in line for line in norms)
    assert "Qwen3MoeExperts" in classes and "Norm" not in classes
    assert finite == "True"
