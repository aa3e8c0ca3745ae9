"""Compares the operators on this machine's GPU with their references on the CPU.

`torch-moe-mps check` runs every operator, and prints and writes the results. accelerate() runs those that a
model uses, once for each combination of package, torch, macOS and GPU; an operator that fails is not used.
"""

import functools
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._extension import SHADERS
from .ops import OPERATORS
from .ops._checks import first_line
from .ops._formats import FORMATS as NAMED_FORMATS
from .ops._formats import Format
from .ops._samples import FORMAT, more_samples, packet, sample_arguments

COMMAND = "torch-moe-mps check"
SWITCH = "MOE_MPS_CHECK"  # in the environment: "0" leaves out the check of accelerate()
# Relative to the largest value of a result: how much rounding in another order may change.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
FORMATS = tuple(NAMED_FORMATS.values())
QUANTIZED = (
    "expert_qmm",
    "moe_experts_quantized",
    "linear_quantized",
    "mlp_quantized",
    "embedding_quantized",
    "heads_quantized",
)
CACHE = "write_cache_quantized_"  # its check covers reading a cache in 8 bits, too
SECONDS = 3.0  # for the check in accelerate(), without compiling; what is left is checked the next time
# The tokens of the calls: one, and enough for products in tiles.
TOKENS = (1, 40)


@dataclass
class Finding:
    """What is wrong with an operator, or with a Metal library.

    Attributes:
        subject: the operator, or the library.
        kind: "does not compile", "raises", "differs", or "gives another result the second time".
        error: the largest difference, relative to the largest value; None where there is no result.
        message: of the compiler or of the error, whole.
        arguments: {name: dtype and shape, or value} of the call.
    """

    subject: str
    kind: str
    dtype: str = ""
    format: str = ""
    error: float | None = None
    message: str = ""
    arguments: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.dtype, self.format)))
        what = self.kind if self.error is None else f"{self.kind} (largest error {self.error:.1e})"
        line = first_line(self.message)
        return f"{self.subject}{f' ({where})' if where else ''} {what}{f': {line}' if line else ''}"


def is_available() -> bool:
    """Whether there is a GPU to check: a Mac's, with the compiled extension."""
    return torch.backends.mps.is_available() and hasattr(torch.ops.moe_mps, "_pipelines")


def machine() -> dict[str, str]:
    """The facts about this machine that a report needs."""
    described = {
        "torch_moe_mps": sys.modules[__package__].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "macos": platform.mac_ver()[0],
        "processor": _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine(),
        "gpu": torch.ops.moe_mps._gpu_name() if is_available() else "",
        "kernels": _kernels(),
    }
    if sys.platform == "darwin":
        described["macos"] += f" ({_output('sw_vers', '-buildVersion')})"
    return described


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _kernels() -> str:
    """Identifies the text of the shaders: a checkout changes without a new version."""
    files = sorted(path for path in SHADERS.rglob("*") if path.suffix in (".metal", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


# --- Metal libraries


def compile_side_by_side(
    names: Iterable[str], built: Callable[[str], object] = lambda name: None
) -> list[Finding]:
    """Has Metal compile libraries, several at a time; calls `built` with each name. Returns: what failed."""
    findings = []
    with ThreadPoolExecutor() as pool:
        futures = {pool.submit(torch.ops.moe_mps._pipelines, name): name for name in names}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                findings.append(Finding(futures[future], "does not compile", message=str(error)))
            built(futures[future])
    return findings


def pipelines(names: Iterable[str]) -> list[dict[str, Any]]:
    """The kernels of libraries that compile: the threads of a threadgroup that Metal allows, the most that a
    plan has asked for in this process, and bytes of threadgroup memory."""
    lines = (line.split() for name in names for line in torch.ops.moe_mps._pipelines(name))
    return [
        {"kernel": kernel, "allowed": int(allowed), "launched": int(launched), "bytes": int(memory)}
        for kernel, allowed, launched, memory in lines
    ]


def libraries(dtypes: Collection[torch.dtype], formats: Collection[Format]) -> list[str]:
    """The names of the libraries for activations of these dtypes and weights in these formats."""
    endings = {DTYPES[dtype] for dtype in dtypes}
    wanted = {f"quantized_{format}" for format in formats}
    return [
        name
        for name in torch.ops.moe_mps._libraries()
        for file, _, dtype in (name.rpartition("_"),)
        if dtype in endings | {"i32", "i64"} and (file in wanted or not file.startswith("quantized"))
    ]


# --- operators


def calls(name: str, dtype: torch.dtype, format: Format = FORMAT) -> Iterator[tuple[str, dict[str, Any]]]:
    """(operator, arguments on the CPU) of valid calls, for each way in which an operator runs.

    `attention` has kernels of its own for a cache in 8 bits, which few models need: these calls belong to the
    operator that writes such a cache.
    """
    samples = sample_arguments("cpu", dtype, format)
    yield name, samples[name]
    if format == FORMAT:
        for called in (name, "attention") if name == CACHE else (name,):
            for changes in more_samples(called, "cpu", dtype):
                if ("k_scales" in changes) == (called != name):
                    yield called, {**samples[called], **changes}
    for tokens in TOKENS:
        yield name, sample_arguments("cpu", dtype, format, tokens)[name]


def check_operator(name: str, dtype: torch.dtype, format: Format | None = None) -> Finding | None:
    """Runs an operator twice on the GPU, and on the CPU. Returns: the fault of the first call that fails."""
    for called, arguments in calls(name, dtype, format or FORMAT):
        fault = compare(called, dtype, arguments)
        if fault is not None:
            fault.dtype = str(dtype).removeprefix("torch.")
            fault.format = "" if format is None else str(format)
            fault.arguments = {key: _text(value) for key, value in arguments.items()}
            return fault
    return None


def compare(name: str, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Finding | None:
    """Makes one call twice on the GPU, and on the CPU. Returns: what is wrong with it."""
    try:
        # Both results of the GPU are kept, so that the second one gets other memory than the first.
        first, second = _results(name, arguments, "mps"), _results(name, arguments, "mps")
        actual, again = ([tensor.cpu() for tensor in results] for results in (first, second))
    except RuntimeError as error:
        kind = "does not compile" if " does not compile: " in str(error) else "raises"
        return Finding(name, kind, message=str(error))
    expected = _results(name, arguments, "cpu")
    largest = max(map(difference, actual, expected), default=0.0)
    if not largest <= TOLERANCE[dtype]:
        return Finding(name, "differs", error=largest)
    if not all(map(torch.equal, actual, again)):
        return Finding(
            name, "gives another result the second time", error=max(map(difference, actual, again))
        )
    return None


def _results(name: str, arguments: Mapping[str, Any], device: str) -> list[Tensor]:
    """What an operator returns, and what it writes in place."""
    own = {
        key: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for key, value in arguments.items()
    }
    operator: Any = packet(name)
    result = operator(**own)
    returned = [*result] if isinstance(result, tuple) else [] if result is None else [result]
    schema = operator.default._schema
    written = [own[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return returned + written


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where one of them is NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else math.inf
    difference = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    return math.inf if math.isnan(difference) else difference / max(largest, 1e-30) if difference else 0.0


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} strides {list(value.stride())}"
    return repr(value)


def work(
    operators: Collection[str], dtypes: Collection[torch.dtype], formats: Collection[Format]
) -> list[tuple[str, torch.dtype, Format | None]]:
    """(operator, dtype, format) of what has to be checked; the format is None without quantised weights."""
    return [
        (name, dtype, format)
        for name in OPERATORS
        if name in operators
        for dtype in dtypes
        for format in (formats if name in QUANTIZED else (None,))
    ]


# --- once a machine


def operators_named(text: str) -> set[str]:
    """The operators that a line of accelerate()'s report names."""
    return set(re.findall(r"\w+", text)) & set(OPERATORS)


def time_allowed() -> float:
    return SECONDS


def failing(
    operators: Collection[str],
    dtypes: Collection[torch.dtype],
    formats: Collection[Format],
    seconds: float | None = None,
) -> tuple[dict[str, Finding], set[str]]:
    """Checks what has not passed on this machine yet, for `seconds` or SECONDS, and remembers what passes.

    Returns: {operator: what is wrong with it}, and the operators for which there was no time.
    """
    wanted = {
        " ".join((name, DTYPES[dtype], *([str(format)] if format else []))): (name, dtype, format)
        for name, dtype, format in work(operators, dtypes, formats)
    }
    return first_failures(check_operator, wanted, seconds)


def first_failures(
    check: Callable[..., Finding | None], calls: Mapping[str, tuple], seconds: float | None = None
) -> tuple[dict[str, Finding], set[str]]:
    """Makes those calls of a check, by their labels, that have not passed on this machine yet.

    Returns: {first argument: what is wrong with it}, and the first arguments for which there was no time.
    """
    passed = passed_before()
    found: dict[str, Finding] = {}
    new, late = set(), set()
    end = time.monotonic() + (time_allowed() if seconds is None else seconds)
    for label, (subject, *others) in calls.items():
        if label in passed or subject in found:
            continue
        if time.monotonic() > end:
            late.add(subject)
        elif finding := check(subject, *others):
            found[subject] = finding
        else:
            new.add(label)
    if new:
        remember(passed | new)
    return found, late


def where() -> str:
    """The machine, in a few words."""
    about = machine()
    return f"{about['gpu']}, macOS {about['macos'] or 'none'}, torch {about['torch']}"


def warning(finding: Finding, instead: str = "what it replaces keeps the model's own code") -> str:
    """What a user is told about an operator that is not used, in one line."""
    return (
        f"torch_moe_mps: on this machine ({where()}) {finding}; {instead}. "
        f"`{COMMAND}` writes a report for an issue"
    )


def cache_file() -> Path:
    """The file that remembers what passed on this machine, in the user's cache directory."""
    home = Path.home()
    root = home / "Library/Caches" if sys.platform == "darwin" else home / ".cache"
    if sys.platform != "darwin" and os.environ.get("XDG_CACHE_HOME"):
        root = Path(os.environ["XDG_CACHE_HOME"])
    about = machine()
    key = "\0".join(about[part] for part in ("torch_moe_mps", "kernels", "torch", "macos", "gpu"))
    return root / "torch_moe_mps" / f"selfcheck-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def passed_before() -> set[str]:
    """What has passed; nothing if the file is missing or damaged."""
    try:
        passed = json.loads(cache_file().read_text())["passed"]
        return set(passed) if all(isinstance(label, str) for label in passed) else set()
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return set()


def remember(passed: Collection[str]) -> None:
    """If the file cannot be written, the next process checks again."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"machine": machine(), "passed": sorted(passed)}, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return
