"""scripts/bench/bench_gpu.py: the package's Metal kernels on an NVIDIA GPU, beside MLX's.

    record     what the operators encode, as a folder of files; needs the simulator (Linux, clang)
    run        that folder on a GPU: every result checked, every time printed; needs torch with CUDA
    sanitize   small cases of all formats under compute-sanitizer's memcheck and racecheck

Without a command: record, then run. A figure is "MSL on this GPU", never "Metal on a Mac"
(tests/measured/README.md).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulator.build_device import BuildError
from simulator.cuda.plan import Plan
from simulator.mlx_kernels import KERNELS, has_kernels, include_folder

from ..cases import attention, experts, fused, gradients, layer
from ..cases.experts import Case
from . import peers_mlx, report, run, worker

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "bench" / "bench_gpu.py"
# Of the cases that are timed.
GROUPS = (
    *("experts", "prefill", "linear", "attention", "norms", "combine", "routing", "fused", "gguf"),
    *("others", "gradients", "variants"),
)
TOOLS = ("memcheck", "racecheck")
SANITIZED = "sanitized.json"  # a file of a plan's folder


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="bench_gpu.py [record | run | sanitize] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs="?", choices=("record", "run", "sanitize", "worker"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--plan", type=Path, default=REPOSITORY / ".cache" / "bench_gpu", help="the folder of files"
    )
    parser.add_argument(
        "--only", metavar="GROUPS", help=f"groups of cases: {','.join(GROUPS)} (default: all)"
    )
    parser.add_argument(
        "--shape",
        default=",".join(map(str, experts.SHAPE)),
        metavar="E,K,H,I",
        help="of experts and prefill, when recording (default: %(default)s)",
    )
    parser.add_argument(
        "--mlx",
        type=Path,
        default=include_folder(),
        metavar="DIR",
        help="the include folder of an mlx wheel (default: that of the installed one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the results there too")
    parser.add_argument("--tool", choices=TOOLS, help="of compute-sanitizer, the only one (default: both)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="sanitize: processes side by side (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, metavar="N", help="sanitize: of each process, the most"
    )
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="K/N",
        help="sanitize: the K-th of N parts of the cases (default: 1/1)",
    )
    parser.add_argument("--kernels", action="store_true", help="registers and time of each dispatch")
    parser.add_argument("--cases", default="", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.groups = options.only.split(",") if options.only else [*GROUPS, "sanitize"]
    if unknown := set(options.groups) - {*GROUPS, "sanitize"}:
        parser.error(f"--only: there is no group {sorted(unknown)[0]}")
    try:
        options.dimensions = tuple(map(int, options.shape.split(",")))
    except ValueError:
        options.dimensions = ()
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.part)
    options.turn, options.turns = map(int, found.groups()) if found else (1, 0)
    if options.turn > options.turns:
        parser.error(f"--part: must be K/N with K from 1 to N, got {options.part}")
    if len(options.dimensions) != 4:
        parser.error("--shape: four numbers are needed, as in 128,8,2048,768")
    if options.mlx and not has_kernels(options.mlx):
        parser.error(f"--mlx {options.mlx}: there is no {KERNELS} in it")
    return options


def all_cases(shape: tuple[int, ...]) -> list[Case]:
    timed = experts.expert_cases(shape) + experts.linear_cases() + experts.gguf_cases(shape)
    timed += attention.attention_cases() + layer.layer_cases() + fused.fused_cases(shape)
    timed += experts.other_cases(shape) + gradients.gradient_cases(shape)
    timed += experts.variant_cases(shape) + fused.chosen_variants(shape)
    sanitized = experts.sanitizer_cases() + experts.sanitizer_blocks() + gradients.sanitizer_gradients()
    return timed + sanitized + attention.sanitizer_attention() + fused.sanitizer_fused()


def say(text: str) -> None:
    print(text, flush=True)


def record(options: argparse.Namespace) -> None:
    from support.simulated import install

    from .record import record as record_case

    install()
    if options.plan.exists() and any(options.plan.iterdir()) and not (options.plan / "plan.json").exists():
        sys.exit(f"error: --plan {options.plan}: there are other files in it")
    shutil.rmtree(options.plan, ignore_errors=True)
    plan = Plan(options.plan)
    if options.mlx:
        peers_mlx.record(plan, options.mlx)
    wanted = [case for case in all_cases(options.dimensions) if case.group in options.groups]
    for case in wanted:
        record_case(plan, case)
    plan.save()
    size = sum(path.stat().st_size for path in options.plan.iterdir())
    mlx = plan.about.get("mlx", "none: pip install mlx")
    say(f"recorded {len(wanted)} cases in {options.plan}, {size / 1e6:.1f} MB; kernels of mlx: {mlx}")


def selected(plan: Plan, groups: list[str]) -> list[int]:
    return [i for i, recording in enumerate(plan.recordings) if run.case_of(recording).group in groups]


def compiled(plan: Plan, numbers: list[int], with_peers: bool) -> None:
    """In processes that have not met CUDA, so the GPU's architecture is asked for in another."""
    from simulator.cuda.compile import compile_all

    code = "import torch; print('sm_%d%d' % torch.cuda.get_device_capability())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if asked.returncode:
        sys.exit(f"error: torch finds no GPU here: {asked.stderr.strip().splitlines()[-1]}")
    recordings = [plan.recordings[number] for number in numbers]
    compile_all(run.jobs(plan, recordings, asked.stdout.strip(), with_peers), say)


def run_all(options: argparse.Namespace) -> int:
    plan, started = Plan.load(options.plan), time.perf_counter()
    numbers = selected(plan, [group for group in options.groups if group != "sanitize"])
    compiled(plan, numbers, with_peers=True)
    results, rows, copy, failures = [], [], 0.0, 0
    extra = ["--kernels"] if options.kernels else []
    for message in worker.supervise(SCRIPT, options.plan, numbers, extra):
        results.append(message)
        if options.json:
            options.json.write_text(json.dumps({"about": plan.about, "messages": results}, indent=1))
        if "copy" in message and not copy:
            copy = message["copy"]
            say(f"{message['device']}, copy {copy:.0f} GB/s, mlx {plan.about.get('mlx', 'not recorded')}")
            say(report.HEADER)
        if "error" in message:
            name = run.case_of(plan.recordings[message["number"]]).name
            say(f"{name:56} FAILED: {message['error']}")
        found = worker.rows_of(message)
        for row in found:
            say(report.line(row, copy))
        for kernel in message.get("kernels", []):
            say(report.kernel_line(kernel))
        rows += found
        failures += "error" in message or any(row.wrong for row in found)
    for text in report.summary(rows):
        say(text)
    say(f"{len(numbers)} cases, {failures} of them wrong, {time.perf_counter() - started:.0f} s")
    return int(failures > 0)


def sanitize(options: argparse.Namespace) -> int:
    """Each allocation is one of the driver's own, so that the tools see where it ends. Inputs are made and
    results checked on the CPU, so that they see few kernels but ours."""
    plan = Plan.load(options.plan)
    every = selected(plan, ["sanitize"])[::-1]  # operators first, then formats of experts
    numbers = every[options.turn - 1 :: options.turns]
    compiled(plan, numbers, with_peers=False)
    parts = [part for i in range(options.jobs) if (part := numbers[i :: options.jobs])]
    failed = False
    for tool in [options.tool] if options.tool else TOOLS:
        say(f"compute-sanitizer --tool {tool}, {len(numbers)} cases")
        with ThreadPoolExecutor(len(parts)) as pool:
            ended = list(pool.map(lambda part, tool=tool: sanitize_part(options, plan, tool, part), parts))
        right = [number for of_part, _ in ended for number in of_part]
        say(f"{tool}: {len(right)} cases right, exit codes {[code for _, code in ended]}")
        failed |= any(code for _, code in ended) or len(right) != len(numbers)
        remember(options.plan, tool, right)
    for text in what_is_left(plan, every, remembered(options.plan)):
        say(text)
    return int(failed)


def remembered(folder: Path) -> dict[str, list[int]]:
    """{tool: the cases of a plan that were right under it}, of all parts until now."""
    file = folder / SANITIZED
    return json.loads(file.read_text()) if file.exists() else {}


def remember(folder: Path, tool: str, right: list[int]) -> None:
    known = remembered(folder)
    known[tool] = sorted({*known.get(tool, ()), *right})
    (folder / SANITIZED).write_text(json.dumps(known))


def what_is_left(plan: Plan, numbers: list[int], right: dict[str, list[int]]) -> list[str]:
    """A line for each kind of case: how many there are, are right under each tool, and are left."""
    kinds: dict[str, list[int]] = {}
    for number in numbers:
        kinds.setdefault(plan.recordings[number].family, []).append(number)
    done = {tool: {*right.get(tool, ())} for tool in TOOLS}
    lines = ["".join(f"{text:>12}" for text in ("cases", *TOOLS, "left")) + "  kind"]
    for kind, of_kind in sorted({**kinds, "all": numbers}.items(), key=lambda item: item[0] == "all"):
        counts = [len(of_kind), *(len(done[tool] & {*of_kind}) for tool in TOOLS)]
        counts.append(sum(any(number not in done[tool] for tool in TOOLS) for number in of_kind))
        lines.append("".join(f"{count:>12}" for count in counts) + f"  {kind}")
    return lines


def sanitize_part(
    options: argparse.Namespace, plan: Plan, tool: str, numbers: list[int]
) -> tuple[list[int], int]:
    """Runs some cases in one process, for at most options.seconds.

    Returns: those that are right, and the exit code: 9 where the tool has found something."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(SCRIPT), "worker"]
    command += ["--plan", str(options.plan), "--check", "--cases", ",".join(map(str, numbers))]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.perf_counter()
    right: list[int] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        limit = threading.Timer(options.seconds, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        for line in process.stdout:
            if (number := worker.right_case(plan, line, say)) is None:
                continue
            right.append(number)
            if len(right) % 20 == 0:  # a run that is cut off has said how far it came
                say(f"{len(right)} of {len(numbers)} cases right, {time.perf_counter() - started:.0f} s")
        limit.cancel()
    if len(right) != len(numbers) or process.returncode:
        say(f"{tool}: {len(right)} of {len(numbers)} cases right, exit code {process.returncode}")
    return right, process.returncode


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        return run_command(options)
    except (BuildError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def run_command(options: argparse.Namespace) -> int:
    if options.command == "worker":
        plan = Plan.load(options.plan)
        worker.work(plan, [int(n) for n in options.cases.split(",")], options.check, options.kernels)
        return 0
    if options.command == "sanitize":
        return sanitize(options)
    if options.command in (None, "record"):
        record(options)
    return run_all(options) if options.command in (None, "run") else 0
