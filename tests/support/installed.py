"""The package as pip installs it: a wheel of this checkout in a folder of its own."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from .processes import REPOSITORY

spec = importlib.util.spec_from_file_location(
    "build_wheel", REPOSITORY / "scripts" / "macos" / "build_wheel.py"
)
build_wheel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_wheel)


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of this test run: the first process that asks lets `make` fill it; the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            folder.mkdir()
            make(folder)
            (folder / "complete").touch()
    return folder


def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout for the tests' machine."""

    def make(folder: Path) -> None:
        build_wheel.build_wheel(build_wheel.copy_sources(folder / "sources"), folder / "wheel")

    (path,) = (once(tmp_path_factory, "wheel", make) / "wheel").glob("*.whl")
    return path


def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which that wheel is installed."""

    def make(folder: Path) -> None:
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", folder)
        build_wheel.run(sys.executable, "-m", "pip", "install", *options, wheel(tmp_path_factory))

    return once(tmp_path_factory, "installed", make)


def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with that wheel, and the packages of this one behind it."""

    def make(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        interpreter = folder / "bin" / "python"
        (own,) = (folder / "lib").glob("python*/site-packages")
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (own / "others.pth").write_text(
            "".join(f"{path}\n" for path in sorted(paths))
        )  # reads none of their .pth
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--ignore-installed")
        build_wheel.run(
            sys.executable, "-m", "pip", "--python", interpreter, "install", *options, wheel(tmp_path_factory)
        )

    return once(tmp_path_factory, "environment", make)


def environment(package: Path, **variables: str) -> dict[str, str]:
    """The variables of a process that finds the installed package, and not this checkout."""
    return {**os.environ, "PYTHONPATH": str(package), **variables}


def python(package: Path, source: str, *arguments: object, **variables: str) -> str:
    """What a fresh interpreter with the installed package prints."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    variables = environment(package, **variables)
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=package)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
