"""Fresh interpreters, which import this checkout."""

import os
import subprocess
import sys
import textwrap
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
