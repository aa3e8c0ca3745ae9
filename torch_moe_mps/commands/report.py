"""`torch-moe-mps report`: all that a Mac can tell in an hour, in one file to send.

Each phase runs in a process of its own, the most telling ones first, and is written as it ends: a phase that
fails, aborts or takes too long leaves the others. The file has no path and no name of the user.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .._environment import with_others
from ..disk import rates
from ..selfcheck.facts import anonymous
from ..selfcheck.machine import is_available
from .check import NO_GPU, why_not
from .results import check_writable

QUESTION = "Why is the sky blue? Answer in one sentence."
INTERVALS = (16, 32, 64)  # dispatches between commits, beside what the package chooses
_EXPERTS_MEMORY = f"{__package__}.experts_memory"  # a module that imports much
_LEFT_OUT = {"outcome": "left out: no time", "code": 1, "seconds": 0}


class Phase(NamedTuple):
    """One process.

    Attributes:
        name: the stem of its files in the report.
        command: arguments of Python; {json} stands for the file of its results.
        minutes: after which it is ended.
        environment: beside this process's own.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    environment: dict[str, str] = {}  # noqa: RUF012  (never written)


def run(options: argparse.Namespace) -> int:
    """Runs the phases and writes the file.

    Returns: the exit code: 1 where a phase failed or was left out, 2 without a GPU.
    """
    if not is_available():
        print(why_not())
        return NO_GPU
    check_writable("--output", options.output)
    known = [*dict.fromkeys(part(phase.name) for phase in phases("MODEL"))]
    without = set() if options.without is None else set(options.without.split(","))
    if unknown := without - {*known}:
        raise ValueError(f"--without must be some of {', '.join(known)}, got {', '.join(sorted(unknown))!r}")
    chosen = [phase for phase in phases(options.model) if part(phase.name) not in without]
    end, outcomes = time.monotonic() + 60 * options.minutes, {}
    with zipfile.ZipFile(options.output, "w", zipfile.ZIP_DEFLATED) as file:
        try:
            for number, phase in enumerate(chosen, 1):
                print(f"[{number}/{len(chosen)}] {phase.name}", end=" ", file=sys.stderr, flush=True)
                seconds = min(60 * phase.minutes, end - time.monotonic())
                outcomes[phase.name] = executed(phase, seconds, file) if seconds > 0 else _LEFT_OUT
                print(outcomes[phase.name]["outcome"], file=sys.stderr, flush=True)
        finally:
            file.writestr("summary.json", anonymous(json.dumps(outcomes, indent=1)))
    for name, outcome in outcomes.items():
        print(f"{name:24} {outcome['outcome']}")
    print(f"Please attach {options.output} to an issue: it has no path and no name of yours.")
    return int(any(outcome["code"] for outcome in outcomes.values()))


def part(phase: str) -> str:
    """Name by which --without excludes a phase and its variants."""
    return phase.partition(" ")[0]


def phases(model: str | None) -> Iterator[Phase]:
    """Phases in order; without a model, only the phases that need none."""
    command = ("-m", "torch_moe_mps")
    yield Phase("quick", (*command, "check", "--quick", "--json", "{json}"), 10)
    yield Phase("probe", (*command, "check", "--probe", "--json", "{json}"), 5)
    if model is not None:
        answer = ("generate", model, "-p", QUESTION, "--max-tokens", "64", "--set", "do_sample=false")
        yield Phase("answer", (*command, *answer), 10)
        bench = (*command, "bench", model, "--depth", "0,4096", "--repeats", "3", "--json", "{json}")
        yield Phase("bench", bench, 10)
        for interval in INTERVALS:
            yield Phase(f"bench commit every {interval}", bench, 5, {"MOE_MPS_COMMIT_EVERY": str(interval)})
        yield Phase("bench without capture", bench, 5, {"MOE_MPS_CAPTURE": "0"})
        yield Phase("experts", ("-m", _EXPERTS_MEMORY, model, "{json}"), 15)
        if find_spec("mlx_lm") is not None:
            yield Phase("mlx", ("-m", "mlx_lm", "benchmark", "--model", model, "-p", "512", "-g", "128"), 10)
    yield Phase("disk", ("-m", rates.__name__, "{json}"), 5)
    yield Phase("check", (*command, "check", "--json", "{json}"), 25)
    yield Phase("large", (*command, "check", "--large", "--json", "{json}"), 10)


def executed(phase: Phase, seconds: float, file: zipfile.ZipFile) -> dict[str, Any]:
    """Runs a phase and writes its output and results. Returns: {outcome, code, seconds}."""
    started = time.monotonic()
    stem = re.sub(r"\W+", "_", phase.name)
    with tempfile.TemporaryDirectory() as folder:
        results, printed = Path(folder, "results.json"), Path(folder, "printed")
        command = [sys.executable, *(str(results) if item == "{json}" else item for item in phase.command)]
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=with_others(phase.environment),
            )
            try:
                code = process.wait(seconds)
                outcome = "done" if code == 0 else f"failed: {_last_line(printed)} (exit code {code})"
            except subprocess.TimeoutExpired:
                code, outcome = 1, f"ended after {seconds / 60:.0f} minutes"
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        file.writestr(f"{stem}.txt", anonymous(printed.read_text(errors="replace")))
        if results.exists():
            file.writestr(f"{stem}.json", anonymous(results.read_text()))
    return {"outcome": outcome, "code": code, "seconds": round(time.monotonic() - started, 1)}


def _last_line(printed: Path) -> str:
    lines = printed.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing printed"
