"""`torch-moe-mps check`, in the simulator."""

import contextlib
import importlib
import itertools
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from support.faults import broken
from support.processes import REPOSITORY, forked
from support.sweep import in_sweep

import torch_moe_mps.transformers
from torch_moe_mps import macs
from torch_moe_mps.commands import check, first_check, main, sources
from torch_moe_mps.models.basics.report import Report
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._formats import FORMATS, Format
from torch_moe_mps.selfcheck import calls, compare, journal, libraries, machine, once, variants
from torch_moe_mps.selfcheck.control import control

ONE = ["check", "--dtype", "float32", "--format", "affine4_32"]
never_launched = check.never_launched


@pytest.fixture
def few(simulated, monkeypatch, tmp_path):
    """Run where the report may be written, with one call of each operator, and of torch's own none.

    All are in the sweep.
    """

    def one_call(subject):
        with contextlib.closing(calls.calls(subject)) as every:
            yield from itertools.islice(every, 1)  # none of what only calls at real sizes have

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no other test's machine passes by it
    monkeypatch.setattr(once, "calls", one_call)
    monkeypatch.setattr(calls, "SIZES", {})
    monkeypatch.setattr(check, "never_launched", lambda kernels: [])
    monkeypatch.setattr(check, "control", lambda dtypes: (0, []))
    monkeypatch.setattr(check.variants, "libraries", lambda dtypes, formats: [])


def report() -> dict:
    with open("moe_mps_report.json") as file:
        return json.load(file)


OFTEN = ["fused_norm_add", "moe_router", "_moe_experts_quantized"]
# Their libraries: to compile the others takes as long as the rest of the file.
BUILT = [
    *("norms_residual_f32", "routing_8_f32", "bucket_i64"),
    *("quantized_few_affine4_32_f32", "quantized_prompts_affine4_32_f32"),
]


@pytest.mark.parametrize("whole", in_sweep([False, True], [False]))
def test_everything_is_built_and_compared(few, capsys, monkeypatch, whole):
    monkeypatch.setattr(check, "control", control)
    built = libraries.libraries([torch.float32], [Format.named("affine4_32")])
    assert len(built) == 71 and {*BUILT} <= {*built}
    if not whole:
        built = BUILT
        monkeypatch.setattr(check, "OPERATORS", OFTEN)
        monkeypatch.setattr(check, "libraries", lambda dtypes, formats: built)
    assert main(ONE) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Simulated Apple GPU, macOS none, torch 2.") and len(out) < 7
    assert out[1] == "Control: 28 of 28 calls of torch's own operators agree with the CPU"
    assert out[-1] == "All built, all equal. Report: moe_mps_report.json"
    written = report()
    subjects = calls.subjects(check.OPERATORS, [torch.float32], [Format.named("affine4_32")])
    checked = {"libraries": len(built), "operators": len(subjects)}
    assert written["failures"] == [] and written["checked"] == checked
    assert {"torch", "macos", "gpu", "torch_moe_mps", "processor"} <= written["machine"].keys()
    kernels = {kernel["kernel"]: kernel for kernel in written["kernels"]}
    norm = kernels["norm_add_f32"]
    assert 0 < norm["launched"] <= norm["allowed"]
    assert {"route8_f32", "bucket_pairs_i64", "gemm32_affine4_32_f32"} <= kernels.keys()


@pytest.mark.sweep
def test_a_type_of_gguf_alone(few, capsys):
    """To which no model is quantised; a norm in front of 2 bits has no kernel."""
    assert main([*ONE[:-1], "q2_k"]) == 0
    kernels = {kernel["kernel"] for kernel in report()["kernels"]}
    assert "matmul_rows_q2_k_f32" in kernels and "matmul_rows_normed_q2_k_f32" not in kernels


def test_torchs_own_faults_are_not_ours(few, capsys, monkeypatch):
    """An operator of torch that is wrong on the GPU is told apart, and fails nothing by itself."""
    monkeypatch.setattr(check, "control", control)
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("silu", lambda x: x.clone(), "MPS")
        assert main(ONE) == 0
    finally:
        library._destroy()
    out = capsys.readouterr().out
    assert "CONTROL: torch's own silu (float32) differs (largest error " in out
    assert "Control: 27 of 28 calls of torch's own operators agree with the CPU" in out
    (failure,) = report()["control"]["failures"]
    assert failure["subject"] == "torch's own silu" and report()["failures"] == []


def test_without_transformers_and_tqdm(few, capsys, monkeypatch):
    """No model is run, which is no fault, and lines stand for bars."""
    for module in ("transformers", "tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(check, "OPERATORS", ["rms_norm", "moe_router"])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["norms_f32"])
    assert main(ONE) == 0
    out, err = capsys.readouterr()
    assert "Model: not run, transformers is not installed\n" in out
    for what in ("Compiling: {} of 1 libraries", "Comparing: {} of 2 checks"):
        assert err.count(what.partition(":")[0] + ":") == 2 and what.format(0) + "\n" in err
    assert "Compiling: 1 of 1 libraries after " in err and "Comparing: 2 of 2 checks after " in err
    assert report()["model"] == "not run: transformers is not installed"


def test_the_bar_knows_how_much_there_is(monkeypatch):
    """Calls at real sizes are checks of their own."""
    seen = []

    class Bar(contextlib.nullcontext):
        def update(self):
            seen.append("done")

    monkeypatch.setattr(check, "Progress", lambda what, total, unit: seen.append(total) or Bar(Bar()))
    monkeypatch.setattr(check, "first_fault", lambda one: None)
    subjects = calls.subjects(["rms_norm", "cached_attention"], [torch.float32], [])
    found = list[compare.Finding]()
    check.compare_all(subjects, found)
    assert found == []
    assert seen[0] == len(seen) - 1 > len(subjects)


def test_a_near_tie_of_experts_is_judged_apart():
    """The fifth of 12 tokens has another second expert, which changes its logits and later ones by 10 %."""
    torch.manual_seed(0)
    routers, logits = [torch.randn(12, 8), torch.randn(12, 8)], torch.randn(1, 12, 32)
    second, third = routers[0][4].topk(3).indices[1:]
    routers[0][4, third] = routers[0][4, second] - 1e-3
    expected = SimpleNamespace(router_logits=routers, logits=logits)
    ours = [router.clone() for router in routers]
    ours[0][4, third] += 2e-3
    ours[1][4:] += 0.1
    actual = SimpleNamespace(router_logits=ours, logits=logits.clone())
    actual.logits[:, 4:] *= 1.1
    tolerance = 2 * compare.TOLERANCE[torch.bfloat16]
    assert compare.difference(actual.logits, logits) > tolerance > check.model_difference(actual, expected, 2)
    actual.logits[:, 3] *= 1.1
    assert check.model_difference(actual, expected, 2) > tolerance
    actual.logits[:, 3] = logits[:, 3]
    ours[0][4, third] += 0.5  # a choice that no rounding explains
    assert check.model_difference(actual, expected, 2) > tolerance


def test_the_report_is_written_behind_each_phase(few, monkeypatch):
    """A process that aborts while it compares leaves the machine, the control and the libraries."""
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["missing"])

    def abort(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "compare_all", abort)
    assert main(ONE) == 130
    written = report()
    assert written["phases"] == ["control", "libraries"] and written["machine"]["torch"]
    assert [failure["kind"] for failure in written["failures"]] == ["does not compile"]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (["--quick"], True),
        (["--quick", "--format", "q4_k"], True),
        ([], True),
        (["--dtype", "float32"], False),
        (["--large"], False),
    ],
)
def test_a_machine_has_passed_by_its_last_check(few, monkeypatch, options, counts):
    """Of all that most models run: not of one dtype, and not of large calls alone."""
    found = list[list[compare.Finding]]()

    monkeypatch.setattr(check, "check_all", lambda d, f, r, s, findings, o, **_: findings.extend(found.pop()))
    monkeypatch.setattr(check, "check_large", lambda d, f, r, findings: findings.extend(found.pop()))
    assert not machine.has_passed()
    for wrong, passes in (([], counts), ([compare.Finding("norms_bf16", "does not compile")], False)):
        found.append(wrong)
        assert main(["check", *options]) == bool(wrong)
        assert machine.has_passed() is passes


def test_quick(few, capsys, monkeypatch, refused):
    asked = []
    monkeypatch.setattr(check, "check_all", lambda *arguments, **_: asked.append(arguments[:2]))
    assert main(["check", "--quick"]) == 0
    assert main(["check", "--quick", "--format", "q4_k"]) == 0
    for (dtypes, formats), names in zip(asked, (["affine4_64", "mxfp4"], ["q4_k"]), strict=True):
        assert dtypes == [torch.bfloat16] and list(map(str, formats)) == names
    assert "--dtype must be left out with --quick, got 'float16'" in refused(
        "check", "--quick", "--dtype", "float16"
    )


@pytest.mark.slow("a model decodes 16 tokens on the CPU, and twice on the simulated GPU")
def test_first(few, capsys):
    """Only the libraries of one format and of one width of heads; the line has what was measured."""
    assert main(["check", "--first"]) == 0
    out, found = capsys.readouterr().out.splitlines(), report()["first"]
    assert out[-2] == "All built, all equal. Report: moe_mps_report.json"
    pattern = (
        r"check --first of torch_moe_mps [\d.]+ \| all right \| Simulated Apple GPU, macOS none, torch 2[^|]+"
        r" \| 15 libraries in [\d.]+ s \| \d+ operators, largest error \d\.\de-\d+ \(\w+\) \| "
        r"[\d.]+ tokens/s captured, [\d.]+ module by module \| \d+ s"
    )
    assert re.fullmatch(pattern, out[-1])
    assert found["captured"] > 0 and found["module by module"] > 0 and found["libraries"] == 15
    assert machine.has_passed()


def test_first_says_what_is_wrong(few, capsys, monkeypatch):
    """What does not compile ends it, as no model runs without."""

    def broken(report, findings, compare_all):
        findings.append(compare.Finding("norms_bf16", "does not compile", message="error: no such type"))
        report["first"] = {"libraries": 15, "seconds_compiling": 2.0}

    monkeypatch.setattr(check.first_check, "check_first", broken)
    assert main(["check", "--first"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "FAILED: norms_bf16 does not compile: error: no such type" in out
    assert "  repeat it: torch-moe-mps check --first" in out
    assert " | 1 failures, first: norms_bf16 does not compile: error: no such type | " in out[-1]
    assert out[-1].endswith(" | 15 libraries in 2.0 s") and not machine.has_passed()


def test_first_judges_the_tokens(simulated, monkeypatch):
    """Logits that differ from the CPU's, and a token that is not captured."""
    right, count = torch.ones(4), itertools.count()
    monkeypatch.setattr(first_check, "_model", lambda: torch.nn.Linear(1, 1))
    monkeypatch.setattr(first_check, "compile_side_by_side", lambda names, built: [])
    monkeypatch.setattr(
        first_check, "decode", lambda model, tokens=None: ([right * (next(count) != 2)], [1], 5.0)
    )
    monkeypatch.setattr(torch_moe_mps.transformers, "accelerate", lambda model, **_: Report())
    monkeypatch.setattr(torch_moe_mps.transformers, "restore", lambda model: model)
    findings = list[compare.Finding]()
    first_check.check_first({}, findings, lambda work, found: None)
    assert [str(each) for each in findings] == [
        "a tiny model, captured, differs (largest error 1.0e+00)",
        "a token was not captured: None",
    ]


def test_first_is_refused_with_others(few, refused, monkeypatch):
    assert "--dtype must be left out with --first, got 'float16'" in refused(
        "check", "--first", "--dtype", "float16"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--first needs transformers, which is not installed" in refused("check", "--first")


def test_the_page_of_a_first_check_has_its_counts(simulated):
    page = (REPOSITORY / "docs" / "first_run.md").read_text()
    quick = [torch.bfloat16], [Format.named("affine4_64"), Format.named("mxfp4")]
    names = [name for name in libraries.libraries(*quick) if not libraries.UNCOMMON.match(name)]
    work = calls.common_subjects(*quick)
    assert f"{len(names)} Metal libraries with" in page and f" s, {len(work)} operators compared" in page
    every = [*calls.DTYPES], [*FORMATS.values()]
    names, work = libraries.libraries(*every), calls.subjects(OPERATORS, *every)
    assert f"{len(names)} libraries, {len(work):,} operators" in page


# {GPU: its cores}; the last two are newer than this release.
GPUS = {
    **{"M1": 8, "M2": 10, "M2 Max": 38, "M2 Ultra": 76, "M3": 10, "M3 Ultra": 80, "M4 Max": 40, "M5 Max": 40},
    **{"M6": 10, "M7 Max": 48},
}

# `check --quick` whose calls are encoded and not computed: it fails for kernels that no call launches.
QUICK_ENCODED = """
    import sys
    import simulator
    from support.simulated import install
    install()
    import torch
    from torch_moe_mps.commands import check, main
    from torch_moe_mps.selfcheck import calls, compare, once

    def encoded(call, end):
        arguments = {n: v.to("mps", copy=True) if hasattr(v, "to") else v for n, v in call.arguments.items()}
        with simulator.dropped():
            try:
                compare.packet(call.operator)(**arguments)
            except ValueError:
                pass  # of heads that the operator does not take, as in compare()

    calls.SIZES.clear()
    once.compare = encoded
    check.check_model = lambda dtype, formats: []
    check.check_control = lambda dtypes: {"failures": []}
    sys.exit(main(["check", "--quick", "--json", "report.json"]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("gpu", GPUS)
def test_quick_launches_every_kernel_on(gpu, tmp_path, monkeypatch):
    """Plans depend on cores, and on the registers and tensor units of the GPU's family."""
    monkeypatch.chdir(tmp_path)
    said = forked(QUICK_ENCODED, SIMULATED_GPU=f"Apple {gpu}", SIMULATED_CORES=GPUS[gpu])
    units = int(gpu[1]) >= 5
    assert f"Apple {gpu}" in said and said.endswith("All built, all equal. Report: report.json")
    assert ("Tensor units: 3 of 3 libraries" in said) == units
    assert (f"Apple {gpu} is newer than this release" in said) == (gpu == "M7 Max")
    kernels = json.loads((tmp_path / "report.json").read_text())["kernels"]
    assert 80 < len(kernels) < 100 + 30 * units and all(kernel["launched"] for kernel in kernels)
    page = (REPOSITORY / "docs" / "first_run.md").read_text()
    assert units or f"with {len(kernels)} kernels compiled in" in page
    assert any("tensor" in kernel["kernel"] for kernel in kernels) == units


@pytest.mark.sweep
@pytest.mark.parametrize("gpu", ["M1", "M2 Max", "M3 Ultra", "M4 Max", "M5 Max"])
def test_quick_passes_on(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = """
        import sys
        from support.simulated import install
        install()
        from torch_moe_mps.commands import main
        sys.exit(main(["check", "--quick"]))
    """
    variables = {"SIMULATED_GPU": f"Apple {gpu}", "SIMULATED_CORES": str(GPUS[gpu])}
    assert "All built, all equal" in forked(source, **variables)


# (kernel, a GPU whose plan has it, the operator that calls it): one for each way of multiplying.
VARIANTS = (
    ("matmul_rows_affine4_64_bf16", "M1", "linear_quantized"),
    ("matmul_rows_few_affine4_64_bf16", "M2", "linear_quantized"),
    ("gemm32_affine4_64_bf16", "M2", "_moe_experts_quantized"),
    ("gemm32_affine4_64_bf16", "M4 Max", "linear_quantized"),
    ("gemm16_split_affine4_64_bf16", "M4 Max", "linear_quantized"),
    ("gemm16_split_mxfp4_bf16", "M1", "linear_quantized"),
    ("gemm64_tensor_affine4_64_bf16", "M5 Max", "linear_quantized"),
)


@pytest.mark.sweep
@pytest.mark.parametrize(("kernel", "gpu", "operator"), VARIANTS)
def test_a_fault_of_one_kernel_is_found_on_the_gpu_that_runs_it(
    simulated, kernel, gpu, operator, monkeypatch
):
    monkeypatch.setenv("SIMULATED_GPU", f"Apple {gpu}")
    torch.ops.moe_mps._plan_for(0)
    dtypes, formats = [torch.bfloat16], [Format.named("mxfp4" if "mxfp4" in kernel else "affine4_64")]
    with simulated.intercepted(broken(kernel)):
        if "tensor" in kernel:
            found = [*check.check_tensor_units(dtypes, formats).faults.values()]
        else:
            found = list[compare.Finding]()
            check.compare_all(calls.subjects([operator], dtypes, formats), found)
    monkeypatch.undo()
    torch.ops.moe_mps._plan_for(0)
    assert found


def test_a_broken_state_makes_it_fail(few, capsys, monkeypatch):
    """What gated_delta_rule_ writes in place is compared, not only what it returns."""
    plain = compare.packet

    def without_state(name):
        def call(**arguments):
            if name == "gated_delta_rule_" and arguments["q"].device.type == "mps":
                arguments["state_"] = arguments["state_"].clone()  # the caller's stays as it was
            return plain(name)(**arguments)

        call.default = plain(name).default
        return call

    monkeypatch.setattr(compare, "packet", without_state)
    monkeypatch.setattr(check, "OPERATORS", ["gated_delta_rule_"])
    small = [each for each in calls.subjects(check.OPERATORS, [torch.float32], []) if each.head == calls.HEAD]
    monkeypatch.setattr(check, "subjects", lambda *arguments: small)
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    assert main(ONE) == 1
    out = capsys.readouterr().out
    assert "FAILED: gated_delta_rule_ (float32) differs (largest error " in out
    assert "  repeat it: torch-moe-mps check --dtype float32" in out
    failure, *_ = report()["failures"]
    assert failure["subject"] == "gated_delta_rule_"
    assert failure["arguments"]["state_"].startswith("float32[2, 4, 16, 8]")


def test_a_gpu_that_fails_is_in_the_report(few, simulated, capsys, monkeypatch):
    """The operator at which it did, in Metal's words; the others are compared."""
    monkeypatch.setattr(check, "OPERATORS", ["rms_norm", "layer_norm"])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    with simulated.failing("timeout", after=1) as failure:
        assert main(ONE) == 1
    assert failure.happened
    (failed,) = report()["failures"]
    assert (failed["subject"], failed["kind"]) == ("layer_norm", "stops the GPU")
    assert "Timeout" in failed["message"] and "FAILED: layer_norm stops the GPU: " in capsys.readouterr().out


def test_one_line_ends_it_once_macos_runs_nothing_more(few, simulated, capsys, monkeypatch):
    """After several errors of the GPU: no line for each operator to come, and what was found before stays."""
    monkeypatch.setattr(check, "OPERATORS", ["rms_norm", "layer_norm", "silu_mul", "moe_router"])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["missing"])
    with simulated.ignoring(1), simulated.failing("timeout", after=1):
        assert main(ONE) == 1
    failures = [(each["subject"], each["kind"]) for each in report()["failures"]]
    assert failures == [
        ("missing", "does not compile"),
        ("layer_norm", "stops the GPU"),
        ("all that follows", "was not compared"),
    ]
    out = capsys.readouterr().out
    assert "FAILED: layer_norm stops the GPU: moe_mps: the GPU has not finished" in out
    assert "FAILED: all that follows was not compared: moe_mps: macOS has stopped all GPU" in out


def test_a_kernel_that_no_call_launches(few, capsys, monkeypatch):
    monkeypatch.setattr(check, "never_launched", never_launched)
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    kernel = {"kernel": "new_f32", "allowed": 1024, "launched": 0, "bytes": 0}
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    monkeypatch.setattr(check, "pipelines", lambda names: [kernel])
    assert main([*ONE, "--json", os.devnull]) == 1
    assert "FAILED: new_f32 was not compared" in capsys.readouterr().out


def test_a_library_that_does_not_compile(few, capsys, monkeypatch):
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["missing", "norms_f32"])
    assert main(ONE) == 1
    assert "FAILED: missing does not compile: moe_mps: no library missing" in capsys.readouterr().out
    assert [failure["message"] for failure in report()["failures"]] == ["moe_mps: no library missing"]


@pytest.mark.parametrize(("kind", "code"), [("differs", 0), ("does not compile", 0), ("stops the GPU", 1)])
def test_what_the_package_does_without_fails_nothing(few, capsys, monkeypatch, kind, code):
    """But for a kernel that stops the GPU, as one launch of it ends a model's step."""
    subjects = "quantized_variants_affine4_32_f32", "tensor_units_affine4_32_f16"
    variant, unit = (compare.Finding(subject, kind, "float16") for subject in subjects)
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    monkeypatch.setattr(check, "check_variants", lambda *arguments: ([], [variant]))
    units = check.tensor_units.Use(faults={unit.subject: unit})
    monkeypatch.setattr(check, "check_tensor_units", lambda *arguments: units)
    assert main(ONE) == code
    out, written = capsys.readouterr().out.splitlines(), report()
    off = [each["subject"] for each in written["off"]]
    if code:
        assert not off and len(written["failures"]) == 2
        assert out[-1].startswith("Please attach it to an issue.")
        return
    assert off == [unit.subject, variant.subject] and written["failures"] == []
    assert f"OFF: {unit}" in out and not any(line.startswith("FAILED") for line in out)
    names = f"{unit.subject} (float16), {variant.subject} (float16)"
    assert out[-1].startswith(f"All right; off: {names}. Please attach it to an issue.")


def test_a_format_is_not_called_wrong_for_another(few, capsys, monkeypatch):
    wrong = [
        compare.Finding("linear_quantized", "differs", "bfloat16", "mxfp4", error=1.0),
        compare.Finding("quantized_few_mxfp4_bf16", "does not compile"),
        compare.Finding("gemm32_nvfp4_global_bf16", "was not compared"),
    ]
    monkeypatch.setattr(check, "check_all", lambda *arguments, **_: arguments[4].extend(wrong[:2]))
    assert main(["check", "--quick"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:-1] == [
        "Right: without a format, affine4_64",
        "Wrong: mxfp4 (2)",
    ]
    formats = [*FORMATS.values()]
    assert check.verdict_of_formats(wrong, formats) == [
        f"Right: {len(formats) - 1} of {len(formats) + 1}",
        "Wrong: mxfp4 (2), nvfp4_global (1)",
    ]
    wrong.append(compare.Finding("rms_norm", "differs", "bfloat16", error=1.0))
    right, of_all = check.verdict_of_formats(wrong[-1:], formats[:2])
    assert right == f"Right: {formats[0]}, {formats[1]}" and of_all == "Wrong: without a format (1)"


def test_where_the_process_before_stopped(few, capsys, monkeypatch, tmp_path):
    """Printed and in the report, once; the process was aborted while it compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(journal, "_open", None)
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["norms_f32"])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    aborted = """
        import os
        from torch_moe_mps.selfcheck import libraries
        libraries._pipelines_of = lambda *arguments: os.abort()
        libraries.compile_side_by_side(["norms_f32"])
    """
    with pytest.raises(AssertionError):
        forked(aborted)
    for stopped in (["compiling norms_f32"], []):
        assert main(ONE) == 0
        out = capsys.readouterr().out
        assert ("The process before stopped in: compiling norms_f32\n" in out) == bool(stopped)
        assert report()["stopped_in"] == stopped
    journal._remove(journal._open)


def test_without_a_mac(capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["check"]) == 2
    assert "no Apple GPU here: nothing was compiled and nothing was compared" in capsys.readouterr().out


def test_on_a_macos_that_torch_does_not_take(capsys, monkeypatch):
    """Torch finds no GPU there and gives no reason."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.setattr(macs, "macos", lambda: (14, 7, 1))
    assert main(["check"]) == 2
    reason = "macOS must be 15 or newer with torch 2.15, got 14.7.1"
    assert capsys.readouterr().out == f"{reason}: nothing was compiled and nothing was compared.\n"
    assert sources.usable_device(None) == "cpu"
    assert capsys.readouterr().err == f"{reason}: operators run their references on the CPU\n"


def test_a_report_that_cannot_be_written(few, capsys, tmp_path):
    """It is said before anything is compiled."""
    assert main([*ONE, "--json", str(tmp_path / "missing" / "report.json")]) == 1
    out, err = capsys.readouterr()
    assert "--json must be a file that can be written, got " in err and "No such file" in err
    assert "Compiling" not in err and "compiled" not in out


def test_a_report_that_a_full_disk_does_not_take_is_printed(few, capsys, monkeypatch):
    monkeypatch.setattr(check, "OPERATORS", [])
    monkeypatch.setattr(check, "check_model", lambda dtype, formats: [])
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["missing"])
    assert main([*ONE, "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "FAILED: missing does not compile" in out
    assert err.splitlines()[-1] == (
        "torch-moe-mps: error: /dev/full cannot be written: No space left on device"
    )


def test_plans_inside_others(simulated):
    """Behind an inner block, the outer one's holds on."""

    plan = torch.ops.moe_mps._gpu_cores
    own = plan()
    with calls.planned_for(7):
        with calls.planned_for(1):
            assert plan() == 1
        assert plan() == 7
    assert plan() == own


def test_unknown_names(few, refused):
    assert "--format must be some of affine1_32, " in refused("check", "--format", "affine4_65")


def test_all_libraries_and_all_formats(simulated):
    arguments = calls.DTYPES, calls.FORMATS
    every = [*libraries.libraries(*arguments), *variants.libraries(*arguments)]
    assert sorted(every) == sorted(torch.ops.moe_mps._libraries()) and len(calls.FORMATS) == 49
    one = libraries.libraries([torch.bfloat16], [Format(4, 64, "affine")])
    assert "quantized_affine4_64_bf16" in one and not [name for name in one if name.endswith("f32")]


@pytest.mark.sweep
def test_every_call_of_every_operator(simulated, tmp_path, monkeypatch):
    """With one format of weights, in one dtype: in the others test_any_arguments has oracles for them."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--dtype", "float16", "--format", "affine4_64"]) == 0


# Of each number of bits one group size, for large calls, too; test_any_arguments has oracles for small ones.
EACH = [format for format in calls.FORMATS if not format.is_affine or format.group_size == 64]
TURNS = [(format, list(calls.DTYPES)[i % 3]) for i, format in enumerate(EACH)]


@pytest.mark.sweep
@pytest.mark.parametrize(("format", "dtype"), TURNS, ids=str)
def test_every_call_of_a_format(simulated, format, dtype):
    subjects = calls.subjects(check.OPERATORS, [dtype], [format])
    found = list[compare.Finding]()
    check.compare_all([subject for subject in subjects if subject.format], found)
    assert found == []
