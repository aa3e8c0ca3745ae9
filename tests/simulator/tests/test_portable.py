"""The simulator as another Metal extension would take it: on its own, with its example."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.testing import linux_only

pytestmark = linux_only
SIMULATOR = Path(__file__).parents[1]
OTHERS = {"torch_moe_mps", "support", "measured", "scripts"}  # of the repository that it lies in


def imported(source: str) -> set[str]:
    """The names of modules that a file imports, in its functions too; relative ones begin with their dots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {"." * node.level + (node.module or alias.name) for alias in node.names}
    return found


def foreign(modules: set[str]) -> list[str]:
    return sorted(module for module in modules if OTHERS & set(module.replace(".", " ").split()))


def test_it_imports_nothing_of_its_surroundings():
    files = [path for path in SIMULATOR.rglob("*.py") if "package" not in path.parts]
    assert len(files) > 40
    assert [(path, bad) for path in files if (bad := foreign(imported(path.read_text())))] == []
    assert foreign(imported("def f():\n    from support import x\n    import torch, measured.apple\n")) == [
        "measured.apple",
        "support",
    ]
    for path in SIMULATOR.rglob("*.[mch]*"):
        if path.suffix in (".mm", ".cpp", ".h"):
            assert "moe_mps" not in path.read_text(), path


@pytest.mark.sweep  # installs and builds the simulator anew
def test_its_example(simulated, tmp_path):
    """Its folder, installed without the package beside it, builds, runs, and finds what is wrong."""
    folder, copy = tmp_path / "folder", tmp_path / "installed" / "simulator"
    shutil.copytree(SIMULATOR, folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-compile",
    ]
    subprocess.run([*pip, "--target", str(copy.parent), str(folder)], check=True, timeout=300)
    assert not {"tests", "README.md"} & {path.name for path in copy.iterdir()}
    command = [sys.executable, str(copy / "example" / "example.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [f"schedule {seed}: right" for seed in range(4)]
    assert "without its barrier: kernel 'normalise'" in lines[4] and "'sums'" in lines[4]
    assert "with a row too many: kernel 'normalise'" in lines[5] and "buffer" in lines[5]
    assert lines[6] == "the strict check: ok"
    assert "double does not exist in Metal" in lines[7]
