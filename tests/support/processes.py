"""Fresh interpreters, which import this checkout."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def environment(*paths: object) -> dict[str, str]:
    """The variables of this process with `paths`, the checkout and its tests in front of other packages."""
    folders = [*paths, REPOSITORY, REPOSITORY / "tests", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}


def python(source: str, *arguments: str, paths: tuple = (), **variables: str) -> str:
    """What a fresh interpreter prints, with `variables` of the environment."""
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(*paths) | variables
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def interrupted(source: str, mark: str, *arguments: object) -> tuple[int, str]:
    """Ctrl-C for a fresh interpreter once it has printed `mark`. Returns: its exit code, and its errors."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        limit = threading.Timer(250, process.kill)
        limit.start()
        try:
            said = ""
            while mark not in said:
                letter = process.stdout.read(1)
                assert letter, said
                said += letter
            process.send_signal(signal.SIGINT)
            return process.wait(), process.stdout.read()
        finally:
            limit.cancel()
            process.kill()
