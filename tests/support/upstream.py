"""One table of what we make of releases of transformers: scripts/upstream.

For each of them the contract (tests/upstream) is tested, and each causal model of transformers' mapping is
built tiny; it says tokens by its own code, by ours module by module, captured, and with 8 bits in its cache.
Each architecture whose config names experts has a row: what runs on operators, and why the rest does not; a
modelling file gives such a row alone. Each model runs in a worker process, which is ended when it takes too
long.
"""

import argparse
import importlib.metadata
import json
import os
import queue
import re
import select
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
KNOWN = REPOSITORY / "tests" / "upstream" / "known.json"  # what is not captured, or has no 8 bits, and why
SECONDS = 120  # for a model
TOLERANCE = 1e-4  # of the largest logit
COARSE = 0.2  # the same of 8 bits
TOKENS = 12
HEADS_OF_32 = {
    "head_dim": 32,
    "hidden_size": 128,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
}
# What configs call the number of experts that a router chooses from.
EXPERTS = re.compile(r"\b(?:moe_)?(?:num|n)_(?:local_|routed_|moe_)?experts\b")
MODELLING = re.compile(r"modeling_(\w+)\.py")
OPERATORS = ("moe_experts", "expert_mm")  # with which a row's words on experts begin
COVERAGE = "Architecture | Experts | Router | Dispatches | Runs eager"  # the head of rows
WIDE = ("d_model", "n_embd", "dim", "emb_dim")


class Result(NamedTuple):
    """How a model runs; None in place of a reason where all is well.

    Attributes:
        built: why its own code does not run.
        wrong: how its tokens differ from those of its own code.
        captured: why its tokens are not captured.
        bits: why its cache does not hold 8 bits.
    """

    name: str
    built: str | None = None
    wrong: str | None = None
    captured: str | None = None
    bits: str | None = None


class Row(NamedTuple):
    """What runs an architecture whose config names experts; "-" for what is not known.

    Attributes:
        experts: the operator, or "no" and why.
        router: the operator; "own" where none runs it.
        dispatches: of a token in each kind of layer, as docs/models.md has them.
        eager: other modules that run unmodified, and why no token is one call.
    """

    name: str
    experts: str
    router: str = "-"
    dispatches: str = "-"
    eager: str = "-"

    @property
    def lack(self) -> str | None:
        """Why its experts run unmodified; None if they do not."""
        return None if self.experts.startswith(OPERATORS) else self.experts.removeprefix("no: ")

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


# --- a worker: what to measure on stdin, a line each; results as JSON


def work() -> None:
    """Measures until there are no more lines."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print
    from support.simulated import install

    install()
    import transformers

    from torch_moe_mps.models.basics.unmodified import all_operators

    transformers.logging.set_verbosity_error()
    print(json.dumps("ready"), file=results, flush=True)
    with all_operators():
        for line in sys.stdin:
            print(json.dumps(answer(line.strip())), file=results, flush=True)


def names() -> list[str]:
    """The causal models of the transformers that is there."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def architectures() -> list[str]:
    """The folders of its models whose config names experts; no model is imported."""
    import transformers

    files = Path(transformers.models.__path__[0]).glob("*/configuration_*.py")
    return sorted({file.parent.name for file in files if EXPERTS.search(file.read_text())})


def answer(line: str) -> Result | Row:
    """What a line asks for: "model" and its name, "experts" and an architecture or a modelling file."""
    kind, _, name = line.partition(" ")
    if kind == "model":
        return measured(name)
    from support import coverage
    from torch_moe_mps._text import first_line

    try:
        return coverage.row(coverage.of_file(Path(name)) if name.endswith(".py") else name)
    except Exception as error:  # of its file, or of code that a row runs
        return Row(name, f"no: {type(error).__name__}: {first_line(error)}")


def measured(name: str) -> Result:
    """A model's result."""
    from torch_moe_mps._text import first_line

    try:
        model = built(name)
        own = said(model)
    except Exception as error:  # of its config, or of its own code for such sizes
        return Result(name, built=f"{type(error).__name__}: {first_line(error)}")
    wrong, captured, bits = None, None, None
    for capture in (False, True):
        how = "captured" if capture else "module by module"
        try:
            accelerated, tokens = run(name, capture=capture)
            fault = difference(tokens, own)
        except Exception as error:
            fault = f"raises {type(error).__name__}: {first_line(error)}"
        else:
            captured = reason(accelerated) if capture else None
        if fault is not None:
            return Result(name, wrong=f"{how}: {fault}")
    try:
        bits = fault_of_8_bits(name)
    except Exception as error:
        bits = f"{type(error).__name__}: {first_line(error)}"
    return Result(name, wrong=wrong, captured=captured, bits=bits)


def built(name: str) -> Any:
    """A tiny model with its own code."""
    from support import tiny_models

    model = tiny_models.other_model(name)
    model.set_experts_implementation("eager")
    return model


def run(name: str, capture: bool) -> tuple[Any, Any]:
    """A model that is accelerated, and its tokens."""
    import torch_moe_mps

    model = built(name)
    torch_moe_mps.accelerate(model, capture=capture)
    return model, said(model)


def said(model: Any) -> Any:
    """What `generate` returns of tokens behind a prompt, with their logits."""
    from support.models import prompt

    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt(1), **how, return_dict_in_generate=True, output_logits=True)


def errors(result: Any, expected: Any) -> list[float]:
    """Of each token, up to the first that is another one: the largest error, of the largest logit."""
    import torch

    found, first = [], result.sequences.shape[1] - len(result.logits)
    for token, (ours, own) in enumerate(zip(result.logits, expected.logits, strict=True)):
        found.append((torch.sub(ours, own).abs().max() / own.abs().max()).item())
        if not torch.equal(*(each.sequences[:, first + token] for each in (result, expected))):
            break
    return found


def difference(result: Any, expected: Any) -> str | None:
    """The first token that differs; None for none."""
    found = errors(result, expected)
    for token, error in enumerate(found):
        if not error <= TOLERANCE:
            return f"token {token} differs by {error:.1g} of the largest logit"
    return None if len(found) == len(expected.logits) else f"token {len(found) - 1} is another one"


def reason(model: Any) -> str | None:
    """Why the last token of a model was not one call."""
    from torch_moe_mps.models.capture.classes import captures_of

    captures = captures_of(model)
    return "its forward has no argument for a cache" if captures is None else captures.reason


def fault_of_8_bits(name: str) -> str | None:
    """Why the cache of a model whose heads allow it does not hold 8 bits, or gives other tokens."""
    from transformers import Cache

    import torch_moe_mps
    from support import tiny_models
    from torch_moe_mps.models.caches.quantized_states import QuantizedStates

    others = tiny_models.SIZES_OF_OTHERS | {key: 128 for key in WIDE if key in tiny_models.SIZES_OF_OTHERS}
    try:
        with tiny_models.sizes(**HEADS_OF_32):
            model = tiny_models.other_model(name, others)
        own = said(model)
    except Exception:  # such sizes are for most models, not for all
        model = built(name)
        own = said(model)
    torch_moe_mps.accelerate(model, kv_bits=8, capture=True)
    result = said(model)
    caches = [value for value in result.values() if isinstance(value, Cache)]
    caches = [getattr(cache, "self_attention_cache", cache) for cache in caches]
    held = [value for cache in caches for layer in cache.layers for value in vars(layer).values()]
    if not any(isinstance(value, QuantizedStates) for value in held):
        return "its cache holds none"
    error = statistics.median(errors(result, own))  # of single tokens a router may choose other experts
    return None if error <= COARSE else f"half of its tokens differ by {error:.1g} of the largest logit"


# --- the versions


def environment(requirement: str, folder: Path) -> Path | None:
    """The folder with a release of transformers and what it needs beside the installed packages.

    None for the release that is installed.
    """
    wanted = Requirement(requirement)
    if wanted.url is None and str(wanted.specifier) == f"=={importlib.metadata.version(wanted.name)}":
        return None
    path = folder / re.sub(r"[^\w.=]+", "_", requirement)
    if str(wanted.specifier)[:2] != "==":  # the newest, or a branch
        shutil.rmtree(path, ignore_errors=True)
    if not path.is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target"]
        subprocess.run([*install, str(path), "--no-deps", requirement], check=True)
        (found,) = importlib.metadata.distributions(name="transformers", path=[str(path)])
        if missing := [*lacking(found.requires or ())]:
            subprocess.run([*install, str(path), *missing], check=True)
    return path


def lacking(requirements: Iterable[str]) -> Iterator[str]:
    """Those of a package's requirements that the installed packages do not meet."""
    for text in requirements:
        each = Requirement(text)
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            met = each.specifier.contains(importlib.metadata.version(each.name), prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            met = False
        if not met:
            yield text


def variables(path: Path | None) -> dict[str, str]:
    """The environment of processes that import a release."""
    paths = [str(path)] if path is not None else []
    paths += [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    own = {"MOE_MPS_CHECK": "0", "MOE_MPS_TUNE": "0"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def asked(path: Path | None, program: str) -> Any:
    """What a program prints as JSON, in a process that imports a release."""
    command = [
        sys.executable,
        "-c",
        f"import json, support.upstream, transformers; print(json.dumps({program}))",
    ]
    printed = subprocess.run(command, env=variables(path), capture_output=True, text=True)
    if printed.returncode:
        raise SystemExit(printed.stderr)
    return json.loads(printed.stdout.splitlines()[-1])


def contract(path: Path | None) -> list[str]:
    """The tests of the contract that fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "--tb=line",
        "tests/upstream",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, env=variables(path), capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.M)


def every(path: Path | None, wanted: list[str], workers: int) -> list[Any]:
    """The answers to lines, in their order."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for line in wanted:
        waiting.put(line)
    found: dict[str, Result | Row] = {}

    def serve() -> None:
        worker: Worker | None = None
        while True:
            try:
                line = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(path)
            found[line] = worker.answer(line)
            print(f"{len(found)} of {len(wanted)}: {line}", file=sys.stderr, flush=True)
            if worker.process.poll() is not None:
                worker = None
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(min(workers, len(wanted)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[line] for line in wanted]


class Worker:
    """A process that measures one model after the other."""

    def __init__(self, path: Path | None) -> None:
        command = [sys.executable, "-m", "support.upstream", "--work"]
        self.process = subprocess.Popen(
            command,
            env=variables(path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=REPOSITORY,
        )
        assert self._line(10 * SECONDS), "a worker does not start"  # which may build the simulator

    def _line(self, seconds: float) -> str:
        """The next line of a process; "" where it takes too long or is gone."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else ""

    def answer(self, line: str) -> Result | Row:
        kind, _, name = line.partition(" ")
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        if printed := self._line(SECONDS):
            return (Result if kind == "model" else Row)(*json.loads(printed))
        gone = self.process.poll()
        self.end()
        fault = f"its process ended ({gone})" if gone else f"over {SECONDS} s"
        return Result(name, wrong=fault) if kind == "model" else Row(name, f"no: {fault}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


# --- the table


class Release(NamedTuple):
    """Results for one release."""

    version: str
    failed: list[str]
    results: list[Result]
    rows: list[Row]

    def faults(self, kind: str) -> dict[str, str]:
        """{model: reason} of those not built, wrong, not captured, without 8 bits or with eager experts."""
        if kind == "experts":
            return {row.name: row.lack for row in self.rows if row.lack is not None}
        return {one.name: why for one in self.results if (why := getattr(one, kind)) is not None}

    def new(self, kind: str) -> dict[str, str]:
        """Those that are not known."""
        known = json.loads(KNOWN.read_text()).get(kind, {})
        return {name: why for name, why in self.faults(kind).items() if name not in known}

    def row(self) -> list[str]:
        total, unbuilt = len(self.results), len(self.faults("built"))
        counts = [total, total - unbuilt, *(len(self.faults(kind)) for kind in ("wrong", "captured"))]
        held = total - unbuilt - len(self.faults("wrong")) - len(self.faults("bits"))
        return [self.version, *map(str, [*counts, held, len(self.failed)]), self.experts()]

    def experts(self) -> str:
        """How many of the architectures whose configs name experts run them on operators."""
        return f"{len(self.rows) - len(self.faults('experts'))} of {len(self.rows)}"

    def is_good(self) -> bool:
        return not (self.failed or any(map(self.new, KINDS)))

    def reasons(self) -> Iterator[str]:
        for test in self.failed:
            yield f"contract: {test}"
        for kind, words in KINDS.items():
            new = self.new(kind)
            for name, why in self.faults(kind).items():
                yield f"{words}, {'new' if name in new else 'known'}: {name}: {why}"


KINDS = {  # of faults -> words
    "wrong": "wrong",
    "experts": "eager experts",
    "captured": "not captured",
    "built": "not built",
    "bits": "no 8 bits",
}
HEADER = [
    "transformers",
    "models",
    "built",
    "wrong",
    "not captured",
    "8 bits",
    "failed tests of the contract",
    "experts on operators",
]


def table(releases: list[Release]) -> str:
    """The table in Markdown, and behind it what is named in it and a row for each with experts."""
    rows = [HEADER, ["---"] * len(HEADER), *(release.row() for release in releases)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for release in releases:
        lines += ["", f"transformers {release.version}:", "", *(f"- {line}" for line in release.reasons())]
        lines += ["", *coverage_table(release.rows)]
    return "\n".join(lines)


def coverage_table(rows: list[Row]) -> list[str]:
    """The lines of a table of architectures whose configs name experts."""
    return [f"| {COVERAGE} |", f"|{'---|' * len(Row._fields)}", *map(str, rows)]


def measure(requirement: str, folder: Path, workers: int, wanted: list[str]) -> Release:
    path = environment(requirement, folder)
    version = asked(path, "transformers.__version__")
    models, experts = asked(path, "(support.upstream.names(), support.upstream.architectures())")
    lines = [f"model {name}" for name in models if name in wanted or not wanted]
    count = len(lines)
    lines += [f"experts {name}" for name in experts if name in wanted or not wanted]
    answers = every(path, lines, workers)
    return Release(version, contract(path), answers[:count], answers[count:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/upstream", description=__doc__)
    parser.add_argument(
        "versions",
        nargs="*",
        help="requirements, transformers==5.24.0, default: the installed one; or modelling files",
    )
    parser.add_argument("--models", help="those models and architectures alone, joined by commas")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a file for the table, too")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    files = [version for version in options.versions if version.endswith(".py")]
    for file in files:
        if not (MODELLING.fullmatch(Path(file).name) and Path(file).is_file()):
            parser.error(f"what ends with .py must be a file modeling_<architecture>.py, got {file}")
    if files:
        rows = every(None, [f"experts {Path(file).resolve()}" for file in files], options.workers)
        return finished("\n".join(coverage_table(rows)), options.output, not any(row.lack for row in rows))
    installed = f"transformers=={importlib.metadata.version('transformers')}"
    folder = Path(os.environ.get("MOE_MPS_CACHE", REPOSITORY / ".cache")) / "upstream"
    wanted = options.models.split(",") if options.models else []
    releases = []
    for version in options.versions or [installed]:
        requirement = version if version.startswith("transformers") else f"transformers=={version}"
        releases.append(measure(requirement, folder, options.workers, wanted))
    return finished(table(releases), options.output, all(release.is_good() for release in releases))


def finished(text: str, output: Path | None, is_good: bool) -> int:
    """The exit status, behind what is printed, and written where a file is named."""
    print(text)
    if output is not None:
        output.write_text(text + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
