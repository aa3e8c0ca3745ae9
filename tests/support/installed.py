"""The package as pip installs it: a wheel of this checkout in a folder of its own."""

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .processes import LEAVE, REPOSITORY

spec = importlib.util.spec_from_file_location(
    "build_wheel", REPOSITORY / "scripts" / "macos" / "build_wheel.py"
)
build_wheel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_wheel)
OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile")


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
        build_wheel.run(
            sys.executable, "-m", "pip", "install", *OPTIONS, "--target", folder, wheel(tmp_path_factory)
        )

    return once(tmp_path_factory, "installed", make)


def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with that wheel, and the packages of this one behind it."""

    def make(own: Path) -> None:
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (own / "others.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))  # without their .pth

    return _environment(tmp_path_factory, "environment", make)


def declared_environment(tmp_path_factory: pytest.TempPathFactory, extra: str = "") -> Path:
    """A virtual environment with that wheel, and links to what its metadata, and its extra's, require."""
    built = zipfile.Path(wheel(tmp_path_factory))
    (about,) = (path for path in built.iterdir() if path.name.endswith(".dist-info"))

    def make(own: Path) -> None:
        link_requirements(importlib.metadata.PathDistribution(about), extra, own)

    return _environment(tmp_path_factory, f"declared_{extra}", make)


def link_requirements(package: importlib.metadata.Distribution, extra: str, target: Path) -> None:
    """Links the installed files of all distributions that a package's metadata requires."""
    wanted, done = [(package.name, extra)], set()
    while wanted:
        name, extra = one = wanted.pop()
        if one in done:
            continue
        done.add(one)
        try:
            distribution = package if name == package.name else importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # tests/alone.txt is installed without requirements
            continue
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted += [(requirement.name, each) for each in ("", *requirement.extras)]
        if distribution is not package:
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (target / top).exists():
                    (target / top).symlink_to(distribution.locate_file(top))


def _environment(tmp_path_factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    def make(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        (own,) = (folder / "lib").glob("python*/site-packages")
        fill(own)
        pip = ("-m", "pip", "--python", folder / "bin" / "python", "install", "--ignore-installed")
        build_wheel.run(sys.executable, *pip, *OPTIONS, wheel(tmp_path_factory))

    return once(tmp_path_factory, name, make)


def environment(package: Path, **variables: str) -> dict[str, str]:
    """The variables of a process that finds the installed package, and not this checkout."""
    return {**os.environ, "PYTHONPATH": str(package), **variables}


def python(package: Path, source: str, *arguments: object, **variables: str) -> str:
    """What a fresh interpreter with the installed package prints."""
    command = [sys.executable, "-c", textwrap.dedent(source) + LEAVE, *map(str, arguments)]
    variables = environment(package, **variables)
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=package)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
