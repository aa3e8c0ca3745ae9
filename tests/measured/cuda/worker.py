"""Runs cases in a process of their own: after a kernel has failed, nothing in it may work any more."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue

from simulator.cuda.plan import Plan

from .run import Row, Runner, case_of

SECONDS = 150  # of one case


def work(plan: Plan, numbers: list[int], only_check: bool, with_kernels: bool) -> None:
    """Runs cases and prints a line of JSON for each; what ends it is printed as such a line too."""
    import torch
    from simulator.cuda.driver import Gpu

    from . import timing

    copy = 0.0 if only_check else timing.copy_bandwidth()
    send({"device": torch.cuda.get_device_name(), "copy": copy})
    runner = Runner(Gpu(plan), plan, only_check)
    for number in numbers:
        message: dict = {"number": number}
        try:
            rows = runner.run(plan.recordings[number])
            message["rows"] = [row.as_dict() for row in rows]
            if with_kernels:
                message["kernels"] = runner.kernels(plan.recordings[number])
            send(message)
        except Exception as error:
            send(message | {"error": f"{type(error).__name__}: {error}"})
            torch.cuda.synchronize()  # raises where nothing works any more


def send(message: dict) -> None:
    print(json.dumps(message), flush=True)


def supervise(script: Path, folder: Path, numbers: list[int], options: list[str]) -> Iterator[dict]:
    """The messages of workers: after one that ended early another takes the cases that follow."""
    left = list(numbers)
    while left:
        command = [sys.executable, str(script), "worker", "--plan", str(folder), *options]
        process = subprocess.Popen(
            [*command, "--cases", ",".join(map(str, left))], stdout=subprocess.PIPE, text=True
        )
        lines: Queue = Queue()
        reader = threading.Thread(target=read, args=(process, lines), daemon=True)
        reader.start()
        reason = ""
        while left:
            try:
                line = lines.get(timeout=SECONDS)
            except Empty:
                reason = f"no answer in {SECONDS} s"
                break
            if line is None:
                reason = f"the worker ended with {process.wait()}"
                break
            message = json.loads(line)
            if "number" in message:
                left.remove(message["number"])
            yield message
        process.kill()
        process.wait()
        if left and reason:
            yield {"number": left.pop(0), "error": reason}


def read(process: subprocess.Popen, lines: Queue) -> None:
    for line in process.stdout:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)


def right_case(plan: Plan, line: str, say: Callable[[str], None]) -> int | None:
    """The case that is right, by a worker's line, if there is one; what else a line says is printed."""
    message = json.loads(line) if line.startswith("{") else {}
    if "number" not in message:
        if not message:
            say(line.rstrip())
        return None
    wrong = message.get("error", "") or "; ".join(row.wrong for row in rows_of(message) if row.wrong)
    if wrong:
        say(f"{case_of(plan.recordings[message['number']]).name}: {wrong}")
    return None if wrong else message["number"]


def rows_of(message: dict) -> list[Row]:
    extra = {"ratio", "gigabytes_per_second"}
    return [Row(**{k: v for k, v in row.items() if k not in extra}) for row in message.get("rows", [])]
