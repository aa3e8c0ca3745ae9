"""Tests that are not run again while nothing has changed that they depend on.

Operators and their kernels, what the cost model says of these, their translation to CUDA, the host code, the
branches that calls take, models in this process and the simulator's own tests are functions of files alone.
With `--kept`, as in `scripts/test`, a test that passed is kept by a digest of its name, those files (of tests
its own), the compilers, the installed packages and the variables that say how to build; it runs again once
one of them differs. What failed is never kept.
"""

import functools
import os
import sys
import sysconfig
import time
from collections import defaultdict
from pathlib import Path

import pytest
from simulator import build

from . import simulated  # noqa: F401  # which says where built pieces are kept

REPOSITORY = Path(__file__).resolve().parents[2]
EVERY_TEST = ("tests/conftest.py", "tests/support", "tests/simulator")
OPERATORS = (
    *("torch_moe_mps/csrc", "torch_moe_mps/shaders", "torch_moe_mps/ops", "torch_moe_mps/quantization"),
    *("torch_moe_mps/selfcheck", "torch_moe_mps/*.py"),
)
KERNELS = (*EVERY_TEST, *OPERATORS, "tests/simulator_tests", "tests/measured", "docs/speed.md")
# {what the names of tests begin with: the folders and files that they depend on}
KEPT = {
    "tests/simulator/tests/": ("tests/simulator", "tests/conftest.py", "tests/support/simulated.py"),
    "tests/simulator_tests/test_apple": KERNELS,
    "tests/simulator_tests/test_cuda": KERNELS,
    "tests/simulator_tests/test_registers": KERNELS,
    "tests/simulator_tests/test_strict": KERNELS,
    "tests/selfcheck/test_branches.py": (*EVERY_TEST, *OPERATORS, "tests/selfcheck"),
    "tests/host/test_macos.py": (
        *(*EVERY_TEST, "tests/host", "scripts/macos.py", "torch_moe_mps/_versions.py"),
        *("torch_moe_mps/csrc", "torch_moe_mps/shaders"),
    ),
    **{
        f"tests/host/test_{name}.py": (*EVERY_TEST, *OPERATORS, "tests/host")
        for name in ("compiled", "extension", "traces", "traffic")
    },
    "tests/ops/": (*EVERY_TEST, *OPERATORS, "tests/ops"),
    "tests/quantization/": (*EVERY_TEST, *OPERATORS, "tests/quantization"),
    # Models reach all rooms of the package, by `torch_moe_mps/__init__.py`.
    "tests/transformers/": (
        *(*EVERY_TEST, "torch_moe_mps", "torch_moe_mps_autoload.py", "tests/transformers"),
        *("tests/measured", "docs/mlx.md"),
    ),
}
# Those of them that depend on more, or that draw other numbers in each run.
RUN_EACH_TIME = (
    *("tests/ops/test_decoded.py", "tests/ops/test_documentation.py", "tests/ops/test_router_logits.py"),
    "tests/ops/test_routing.py::test_ties_of_any_shape_on_cpu",
    "tests/quantization/test_gguf.py::test_the_table_in_the_documentation",
    "tests/transformers/models/test_stress.py",  # threads meet in another order each time
)
_STARTED = "MOE_MPS_TESTS_STARTED"  # of the whole run: all its processes then keep the same tests


@functools.cache
def files(patterns: tuple[str, ...], root: Path = REPOSITORY) -> list[Path]:
    """The files of folders, and those that patterns match."""
    matching = {path for pattern in patterns for path in root.glob(pattern)}
    inside = {path for folder in matching if folder.is_dir() for path in folder.rglob("*")}
    return sorted(path for path in matching | inside if path.is_file() and path.suffix != ".pyc")


@functools.cache
def _part(path: Path, root: Path) -> str:
    return build.digest(path.relative_to(root), path.read_bytes())


@functools.cache
def contents(patterns: tuple[str, ...], test: str, root: Path = REPOSITORY) -> str:
    """A digest of the names and the bytes of files: of files of tests, that of `test` alone."""
    counted = [path for path in files(patterns, root) if not path.match("test_*.py") or path == root / test]
    return build.digest(*(_part(path, root) for path in counted))


def forget() -> None:
    """Files are read again."""
    for known in (files, _part, contents):
        known.cache_clear()


def environment() -> str:
    """A digest of what else a result depends on: compilers, installed packages, variables that say how."""
    compilers = [build.run([tool, "--version"], "asking") for tool in (build.tool("clang++"), build.LINK[0])]
    packages = sorted(path.name for path in Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info"))
    names = sorted(name for name in os.environ if name.startswith(("METAL_SIMULATOR_", "MOE_MPS_")))
    variables = [(name, os.environ[name]) for name in names if name != _STARTED and "CACHE" not in name]
    return build.digest(compilers, packages, variables, sys.version)


class Kept:
    """The plugin: which tests are kept, and which pass in this run."""

    def __init__(self) -> None:
        self.environment = environment()
        self.started = float(os.environ.setdefault(_STARTED, repr(time.time())))
        self.outcomes: dict[str, set[str]] = defaultdict(set)
        self.count = 0

    def record(self, test: str) -> Path | None:
        """The file that says that a test has passed; None where it has to run each time."""
        patterns = next((KEPT[prefix] for prefix in KEPT if test.startswith(prefix)), None)
        if patterns is None or test.startswith(RUN_EACH_TIME):
            return None
        return build.cache_directory("passed") / build.digest(
            test, contents(patterns, test.partition("::")[0]), self.environment
        )

    def is_kept(self, test: str) -> bool:
        record = self.record(test)
        return record is not None and record.exists() and record.stat().st_mtime < self.started

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        kept = {item for item in items if self.is_kept(item.nodeid)}
        self.count = len(kept)
        config.hook.pytest_deselected(items=list(kept))
        items[:] = [item for item in items if item not in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        self.outcomes[item.nodeid].add(report.outcome)
        return report

    def pytest_sessionfinish(self, session):
        """Keep what passed, unless a file was changed meanwhile."""
        if hasattr(session.config, "workeroutput"):  # one of several processes
            session.config.workeroutput["kept"] = self.count
        passed = [test for test, outcomes in self.outcomes.items() if outcomes == {"passed"}]
        before = {test: self.record(test) for test in passed}
        forget()
        for test, record in before.items():
            if record is not None and record == self.record(test):
                record.touch()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.count = getattr(node, "workeroutput", {}).get("kept", 0)

    def pytest_terminal_summary(self, terminalreporter):
        if self.count:
            terminalreporter.line(f"{self.count} tests kept: they passed with the same files and compilers")
