"""`torch-moe-mps check`: every kernel compiled on this Mac, every operator compared with the CPU.

The report is written after each phase, so that a process that is killed leaves its results.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._faults import lost_gpu, raise_fault, release_cache
from .._progress import Progress
from ..macs import is_known, refusal
from ..ops import OPERATORS
from ..ops._formats import Format
from ..selfcheck import large, probe, tensor_units, tuner, variants
from ..selfcheck.calls import DTYPES, FORMATS, Subject, common_subjects, subjects
from ..selfcheck.compare import TOLERANCE, Finding, compare, difference, in_words
from ..selfcheck.control import control
from ..selfcheck.facts import anonymous, facts
from ..selfcheck.journal import noted, stopped
from ..selfcheck.libraries import UNCOMMON, compile_side_by_side, libraries, pipelines
from ..selfcheck.machine import COMMAND, is_available, remember_check
from ..selfcheck.once import checks_of, first_fault
from . import first_check
from .results import check_writable, written_whole

REPORT = "moe_mps_report.json"
NO_GPU = 2  # the exit code where nothing can be checked
STOPS = "stops the GPU"
MOST_NAMED = 6  # formats that are right
QUICK = {"--dtype": "bfloat16", "--format": "affine4_64,mxfp4"}  # kernels of most models on Macs
Item = TypeVar("Item")
Save = Callable[[str, list[Finding]], None]  # takes a phase that has ended, and what is wrong so far


class LostGPU(Exception):
    """macOS runs nothing more of this process.

    Attributes:
        findings: what stopped the GPU, where that is known, and that all that follows was not compared.
    """

    def __init__(self, subject: str, error: Exception, lost: Exception):
        super().__init__(str(lost))
        stops = [Finding(subject, STOPS, message=str(error))] if str(error) != str(lost) else []
        self.findings = [*stops, Finding("all that follows", "was not compared", message=str(lost))]


def run(options: argparse.Namespace) -> int:
    """Prints a verdict and writes the report.

    Returns: the exit code: 1 where anything fails that the package needs, 2 without a GPU.
    """
    if not is_available():
        print(why_not())
        return NO_GPU
    check_writable("--json", options.json)
    if options.bisect is not None:
        from .bisection import bisect  # it needs transformers, which check does not

        return bisect(options.bisect, options.json)
    dtypes, formats = _dtypes_and_formats(options)
    if options.probe:
        return _probe(options.json)
    path = options.json or REPORT
    check_writable("--json", path)
    report: dict[str, Any] = {"machine": facts(), "stopped_in": stopped(), "phases": []}
    findings, optional = list[Finding](), list[Finding]()
    _print_machine(report)

    def save(phase: str, findings: list[Finding]) -> None:
        report["phases"].append(phase)
        report["failures"], report["off"] = ([*map(_entry, each)] for each in (findings, optional))
        with written_whole(path):
            Path(path).write_text(anonymous(json.dumps(report, indent=1, allow_nan=False)))

    def save_so_far(phase: str, findings: list[Finding]) -> None:
        with contextlib.suppress(OSError):  # a full disk is told at the end, behind what was found
            save(phase, findings)

    report["control"] = check_control({str(dtype).removeprefix("torch."): dtype for dtype in dtypes})
    save_so_far("control", [])
    if options.first:
        checked = partial(first_check.check_first, report, findings, compare_all)
    elif options.large:
        dtype = dtypes[0] if options.dtype else torch.bfloat16
        format = formats[0] if options.format else Format.named("affine4_64")
        checked = partial(check_large, dtype, format, report, findings)
    else:
        checked = partial(
            check_all, dtypes, formats, report, save_so_far, findings, optional, quick=options.quick
        )
    try:
        checked()
    except LostGPU as lost:
        findings += lost.findings
    _print_verdict(findings, optional, bool(report["control"]["failures"]), path, options)
    if findings and not (options.large or options.first):
        print("\n".join(verdict_of_formats(findings, formats)))
    print(f"{_last_words(findings, optional)} Report: {path}")
    save("all", findings)
    if options.first or options.quick or not (options.large or options.dtype or options.format):
        remember_check(not findings)
    if options.first:
        print(first_check.line(report["machine"], report, findings))
    return 1 if findings else 0


def _print_machine(report: dict[str, Any]) -> None:
    """Prints what stopped the process before, and the machine."""
    for step in report["stopped_in"]:
        print(f"The process before stopped in: {step}")
    about = report["machine"]
    print(f"{about['gpu']}, macOS {about['macos'] or 'none'}, torch {about['torch']}")
    if not is_known(about["gpu"]):
        print(
            f"{about['gpu']} is newer than this release: kernels are planned for its "
            f"{about['cores_planned_for']} cores"
        )


def _dtypes_and_formats(options: argparse.Namespace) -> tuple[list[torch.dtype], list[Format]]:
    """The dtypes and formats that the options choose.

    Raises: ValueError for names that are unknown, or that do not go with another option.
    """
    names = {"--dtype": options.dtype, "--format": options.format}
    _refuse_chosen(names, options)
    if options.first:
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("--first needs transformers, which is not installed; --quick does not")
        return [first_check.DTYPE], [first_check.FORMAT]
    if options.quick:
        names = QUICK | {option: value for option, value in names.items() if value is not None}
    dtypes = _chosen("--dtype", names["--dtype"], {str(d).removeprefix("torch."): d for d in DTYPES})
    formats = _chosen("--format", names["--format"], {str(format): format for format in FORMATS})
    for option, chosen in (("--dtype", dtypes), ("--format", formats)):
        if options.large and names[option] is not None and len(chosen) > 1:
            raise ValueError(f"{option} must be one name with --large, got {names[option]!r}")
    return dtypes, formats


def _refuse_chosen(names: Mapping[str, str | None], options: argparse.Namespace) -> None:
    """Raises: ValueError for a dtype or format next to an option that chooses it."""
    whole = options.probe or options.first
    for option, value in names.items():
        if value is not None and (whole or (options.quick and option != "--format")):
            instead = "--probe" if options.probe else "--first" if options.first else "--quick"
            raise ValueError(f"{option} must be left out with {instead}, got {value!r}")


def _command(finding: Finding, options: argparse.Namespace) -> str:
    """The command that repeats a finding: its dtype and format, as far as they are known."""
    dtype, format = finding.dtype or options.dtype, finding.format or options.format
    if options.first:
        return f"{COMMAND} --first"
    if not finding.dtype and options.quick:
        return f"{COMMAND} --quick" + (f" --format {format}" if format else "")
    parts = [COMMAND, "--large" if options.large else "", f"--dtype {dtype}" if dtype else ""]
    return " ".join(filter(None, [*parts, f"--format {format}" if format else ""]))


def _print_verdict(
    findings: list[Finding],
    optional: list[Finding],
    control_failed: bool,
    path: str,
    options: argparse.Namespace,
) -> None:
    """Prints optional kernels that stay off, and failures, each with the command that repeats it."""
    for word, finding in [*(("OFF", each) for each in optional), *(("FAILED", each) for each in findings)]:
        print(f"{word}: {finding}")
        for line in finding.lines():
            print(f"  {line}")
        print(f"  repeat it: {_command(finding, options)}")
    if findings and control_failed:
        print("Torch's own operators are wrong here, too: the failures above may be theirs.")


def _last_words(findings: list[Finding], optional: list[Finding]) -> str:
    if findings:
        return "Please attach it to an issue."
    if not optional:
        return "All built, all equal."
    off = ", ".join(dict.fromkeys(finding.what for finding in optional))
    return f"All right; off: {off}. Please attach it to an issue."


def verdict_of_formats(findings: Iterable[Finding], formats: Sequence[Format]) -> list[str]:
    """Lines that say which formats are right and which are wrong; what no format has is needed by each."""
    counts = dict.fromkeys(["without a format", *map(str, formats)], 0)
    for finding in findings:
        counts[_format_of(finding, formats) or "without a format"] += 1
    right = [name for name, count in counts.items() if not count]
    named = ", ".join(right) if len(right) <= MOST_NAMED else f"{len(right)} of {len(counts)}"
    wrong = (f"{name} ({count})" for name, count in counts.items() if count)
    return [f"Right: {named or 'none'}", f"Wrong: {', '.join(wrong)}"]


def _format_of(finding: Finding, formats: Sequence[Format]) -> str:
    """The format of a finding, also of a library's or a kernel's; empty where it has none."""
    inside = [name for name in map(str, formats) if f"_{name}_" in f"_{finding.subject}_"]
    return finding.format or max(inside, key=len, default="")


def check_control(dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """Differences of torch's own operators from the CPU, which are printed: these are not ours to mend."""
    count, findings = control(dtypes)
    for finding in findings:
        print(f"CONTROL: {finding}")
    print(f"Control: {count - len(findings)} of {count} calls of torch's own operators agree with the CPU")
    return {"calls": count, "failures": [_entry(finding) for finding in findings]}


def check_all(
    dtypes: Sequence[torch.dtype],
    formats: Sequence[Format],
    report: dict[str, Any],
    save: Save,
    findings: list[Finding],
    optional: list[Finding],
    quick: bool = False,
) -> None:
    """Compiles every library, compares every operator, a tiny model, the tensor units, and variants.

    With `quick`, only the libraries and operators that most models run.

    What is wrong is added to `findings`. What the package does without is added to `optional`: it uses tensor
    units that have passed, and of variants those with the bits of the planned kernel.

    Raises: LostGPU.
    """
    started = time.perf_counter()
    names = libraries(dtypes, formats)
    if quick:
        names = [name for name in names if not UNCOMMON.match(name)]
    with Progress("Compiling", len(names), "library") as bar:
        findings += compile_side_by_side(names, lambda name: bar.update())
    report["seconds_compiling"] = round(time.perf_counter() - started, 1)
    save("libraries", findings)
    work = common_subjects(dtypes, formats) if quick else subjects(OPERATORS, dtypes, formats)
    compare_all(work, findings)
    failed = {finding.subject for finding in findings}
    report["kernels"] = pipelines(name for name in names if name not in failed)
    findings += [Finding(kernel, "was not compared") for kernel in never_launched(report["kernels"])]
    save("operators", findings)
    report["model"] = _check_model_if_possible(dtypes, formats, findings, quick)
    save("model", findings)
    units = check_tensor_units(dtypes, formats)
    faults = [*units.faults.values()]
    of_units = pipelines(units.libraries)
    faults += [Finding(kernel, "was not compared") for kernel in never_launched(of_units)]
    report["kernels"] += of_units
    count = (
        f"{len(units.libraries)} of {len(units.libraries) + len(units.faults)} libraries agree with the CPU"
    )
    report["tensor_units"] = f"off: {units.reason}" if units.reason else count
    report["tuned"] = tuned = tuner.remembered()
    report["checked"] = {"libraries": len(names), "operators": len(work)}
    print(
        f"{len(names)} Metal libraries with {len(report['kernels'])} kernels compiled in "
        f"{report['seconds_compiling']} s, {len(work)} operators compared with the CPU"
    )
    print(f"Tensor units: {report['tensor_units']}")
    report["variants"], of_variants = check_variants(dtypes, formats)
    for fault in faults + of_variants:
        (findings if fault.kind == STOPS else optional).append(fault)
    if tuned:
        print(tuner.told(tuned))


def _check_model_if_possible(
    dtypes: Sequence[torch.dtype], formats: Sequence[Format], findings: list[Finding], quick: bool
) -> str:
    """ "run" after comparing a tiny model, or why not; adds its failures to `findings`."""
    if importlib.util.find_spec("transformers") is None:
        print("Model: not run, transformers is not installed")
        return "not run: transformers is not installed"
    weights = [format for format in formats if format.row.is_of_mlx][:1]
    findings += check_model(dtypes[-1], weights if quick else [None, *weights])
    return "run"


def check_large(dtype: torch.dtype, format: Format, report: dict[str, Any], findings: list[Finding]) -> None:
    """Compares calls of the sizes of real models, all of them. Raises: LostGPU."""
    report["large"] = entries = list[Any]()
    for what, call in large.calls(dtype, format):
        started = time.perf_counter()
        with noted(f"calling {what}: {call.operator} of {in_words(call)}"):
            finding = _or_fault(call.operator, partial(compare, call))
        if finding is not None:
            finding.message = " ".join(filter(None, (what, finding.message)))
        seconds = round(time.perf_counter() - started, 1)
        entries.append(
            {"call": what, "operator": call.operator, "seconds": seconds, "right": finding is None}
        )
        print(f"{what}: {'wrong' if finding else 'right'} ({seconds} s)", flush=True)
        findings += [finding] if finding else []
        release_cache()


def _entry(finding: Finding) -> dict[str, Any]:
    """Entry of a report, with infinity as text, since JSON has no number for it."""
    entry = asdict(finding)
    if finding.error is not None and not math.isfinite(finding.error):
        entry["error"] = str(finding.error)
    return entry


def _probe(path: str | None) -> int:
    """Prints the page alone, so that it can be sent to a file."""
    names = [name for name in libraries([torch.bfloat16], [Format.named("affine4_64")]) if "_i" not in name]
    with Progress("Probing", len(probe.PARTS), "part") as bar:
        result = probe.probe(probe.ProbeSizes(), names, lambda name: bar.update())
    page = anonymous(json.dumps(result, indent=1, allow_nan=False))
    print(page)
    if path is not None:
        with written_whole(path):
            Path(path).write_text(page + "\n")
    return 1 if any("error" in part for part in result.values() if isinstance(part, dict)) else 0


def never_launched(kernels: Iterable[dict[str, Any]]) -> list[str]:
    """The names of kernels that have not run in this process."""
    return [kernel["kernel"] for kernel in kernels if not kernel["launched"]]


def compare_all(work: Sequence[Subject], findings: list[Finding]) -> None:
    """Compares each subject with the CPU, up to its first failing call. Raises: LostGPU."""
    checks = checks_of(work)
    with Progress("Comparing", len(checks), "check") as bar:
        for check in checks:
            if finding := _or_fault(check.subject, partial(first_fault, check)):
                findings.append(finding)
            bar.update()


def _or_fault(subject: str, compared: Callable[[], Finding | None]) -> Finding | None:
    """Result of a comparison, or Metal's message where the GPU itself has failed.

    Raises: LostGPU once macOS runs nothing more of this process, so that each further comparison would fail.
    """
    try:
        return compared()
    except torch.AcceleratorError as error:
        if (lost := lost_gpu()) is not None:
            raise LostGPU(subject, error, lost) from None
        return Finding(subject, STOPS, message=str(error))


def check_tensor_units(dtypes: Sequence[torch.dtype], formats: Sequence[Format]) -> tensor_units.Use:
    """Every library for tensor units, where there are some."""
    if reason := tensor_units.why_not():
        return tensor_units.Use(reason=reason)
    use = tensor_units.Use()
    names = tensor_units.libraries(dtypes, formats)
    with Progress("Tensor units", 2 * len(names), "step") as bar:
        compile_side_by_side(names, lambda name: bar.update())
        for name in names:
            if fault := _or_fault(name, partial(first_fault, tensor_units.check_of(name))):
                use.faults[name] = fault
            else:
                use.libraries.append(name)
            bar.update()
    return use


def check_variants(
    dtypes: Sequence[torch.dtype], formats: Sequence[Format]
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Compares what the tuner may take in place of planned kernels.

    Returns: the kernels that compile, and the findings.
    """
    names = variants.libraries(dtypes, formats)
    with Progress("Variants", 2 * len(names), "step") as bar:
        findings = compile_side_by_side(names, lambda name: bar.update())
        failed = {finding.subject for finding in findings}
        for name in [name for name in names if name not in failed]:
            if fault := _or_fault(name, partial(first_fault, variants.check_of(name))):
                findings.append(fault)
            bar.update()
    kernels = pipelines(name for name in names if name not in failed)
    findings += [Finding(kernel, "was not compared") for kernel in never_launched(kernels)]
    print(f"Kernels for the tuner: {len(kernels)} compared with the CPU, {len(findings)} faults")
    return kernels, findings


def check_model(dtype: torch.dtype, weights: Sequence[Format | None]) -> list[Finding]:
    """A tiny Qwen3-MoE, dense (None) or quantised: its logits on the GPU beside those on the CPU."""
    import transformers

    from ..transformers import accelerate, restore

    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None},
    )
    ids = torch.arange(1, 13)[None]
    findings = []
    for format in weights:
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config).to(dtype).eval()
        quantisation = {} if format is None else format.to_dict()
        try:
            with torch.no_grad(), noted(f"running a tiny model in {format or dtype}"):
                accelerate(model, **quantisation, check=False)
                expected = model(ids, output_router_logits=True)
                accelerate(restore(model).to("mps"), check=False)
                actual = model(ids.to("mps"), output_router_logits=True)
                largest = model_difference(actual, expected, config.num_experts_per_tok)
                raise_fault()
        except RuntimeError as error:
            if (lost := lost_gpu()) is not None:
                raise LostGPU("model", error, lost) from None
            findings.append(Finding("model", "raises", format=str(format or ""), message=str(error)))
            continue
        if not largest <= 2 * TOLERANCE[dtype]:
            findings.append(Finding("model", "differs", format=str(format or ""), error=largest))
    for finding in findings:
        finding.dtype = str(dtype).removeprefix("torch.")
    return findings


def model_difference(actual: Any, expected: Any, chosen: int) -> float:
    """Largest difference of routers' logits and of the model's, up to the first token with other experts.

    A choice between two that are nearly equal may fall otherwise, which changes that token's logits, and what
    later tokens attend to, by more than rounding does. Where a choice is otherwise without such a tie, the
    router's logits differ.
    """
    tokens, largest = expected.logits.shape[1], 0.0
    for a, e in zip(actual.router_logits, expected.router_logits, strict=True):
        a, e = a[:tokens].cpu(), e[:tokens]
        largest = max(largest, difference(a, e))
        experts = [logits.topk(chosen).indices.sort().values for logits in (a, e)]
        otherwise = (experts[0] != experts[1]).any(1).nonzero()
        tokens = min([tokens, *otherwise[:1].flatten().tolist()])
    return max(largest, difference(actual.logits[:, :tokens].cpu(), expected.logits[:, :tokens]))


def why_not() -> str:
    """Reason why no GPU can be checked on this machine."""
    cannot = "nothing was compiled and nothing was compared"
    if reason := refusal():
        return f"{reason}: {cannot}."
    if not torch.backends.mps.is_available():
        return (
            f"torch finds no Apple GPU here: {cannot}. What Apple's compiler and GPUs make of the kernels "
            "only a Mac can show; on Linux, scripts/test of a checkout runs them in a simulator."
        )
    return f"The Metal extension is not loaded: {cannot}. `import torch_moe_mps` warns of the reason."


def _chosen(option: str, text: str | None, known: dict[str, Item]) -> list[Item]:
    """The items that are named with commas between; all of them unless any are."""
    names = [*known] if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} must be some of {', '.join(known)}, got {name!r}")
    return [known[name] for name in names]
