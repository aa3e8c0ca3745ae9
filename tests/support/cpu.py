"""The CPU seconds of a test run: a line at its end, and with `--cpu FILE` a table of files and tests.

Counted are user and system time of pytest, its workers, and the processes that tests start and wait for.
Unless shaders or host code were compiled meanwhile, `scripts/test` fails where all tests take more than
`LIMIT`, and where a file takes more than `OF_A_FILE` and says nowhere why.
"""

import ast
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from simulator import build

from . import processes, simulated  # noqa: F401  # which says where built pieces are kept

LIMIT = 1_600  # of all tests that run for every change
OF_A_FILE = 30  # without a slow test, or its costs in the docstring
MOST_BUILT = 100  # pieces, of thousands in a new clone: tests of the compiler make some each time


class Table:
    """CPU seconds of each test, fixtures and other processes included."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.forked = 0.0  # of processes that are no children of pytest or its workers
        self._before = spent()
        self.started = time.time()

    def since_last(self) -> tuple[float, float]:
        """Seconds of this process since the last call: all, and those of forked processes."""
        before, self._before = self._before, spent()
        return self._before[0] - before[0], self._before[1] - before[1]

    def files(self) -> Counter[str]:
        files: Counter[str] = Counter()
        for test, value in self.tests.items():
            files[test.partition("::")[0]] += value
        return files

    def text(self, seconds: float) -> str:
        files = self.files()
        files["imports and collection"] = seconds - files.total()
        parts = [f"{seconds:.1f} in all", *map(_lines, (files, self.tests))]
        return "\n\n".join(parts) + "\n"


def _lines(seconds: Counter[str]) -> str:
    return "\n".join(f"{value:8.2f} {name}" for name, value in seconds.most_common())


def spent() -> tuple[float, float]:
    """CPU seconds of this process with those that it waited for, and of forked ones."""
    forked = processes.spent.seconds
    return sum(os.times()[:4]) + forked, forked


TABLE = Table()


def pytest_runtest_logstart():
    TABLE.since_last()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A report has the seconds of its phase: workers send them along."""
    report = yield
    report.cpu_seconds, report.cpu_seconds_forked = TABLE.since_last()
    return report


def pytest_runtest_logreport(report):
    if hasattr(report, "cpu_seconds"):  # a test whose worker ended has a report of xdist's
        TABLE.tests[report.nodeid] += report.cpu_seconds
        TABLE.forked += report.cpu_seconds_forked


def pytest_terminal_summary(terminalreporter, config):
    seconds = _seconds()
    terminalreporter.write_line(f"{seconds:,.0f} CPU seconds; all tests have {LIMIT:,}")
    if path := config.getoption("cpu"):
        Path(path).write_text(TABLE.text(seconds))
    if config.getoption("all_tests"):
        for fault in faults(TABLE, seconds, config.rootpath):
            terminalreporter.write_line(fault, red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Behind the summary, and the end of the workers."""
    result = yield
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if session.config.getoption("all_tests") and session.exitstatus == 0 and not is_worker:
        session.exitstatus = int(bool(faults(TABLE, _seconds(), session.config.rootpath)))
    return result


def _seconds() -> float:
    return sum(os.times()[:4]) + TABLE.forked  # once the workers have ended


def faults(table: Table, seconds: float, root: Path) -> list[str]:
    """What is wrong with the seconds of all tests; nothing if much was compiled meanwhile."""
    built = (file.stat().st_mtime > table.started for file in build.cache_directory().rglob("*.so"))
    if sum(built) > MOST_BUILT:
        return []
    files = [(name, value) for name, value in table.files().most_common() if value > OF_A_FILE]
    found = [
        f"{name} takes {value:.0f} CPU seconds: say why in its docstring, or mark tests of it slow"
        for name, value in files
        if not says_why((root / name).read_text())
    ]
    if seconds > LIMIT:
        found.append(f"{seconds:,.0f} CPU seconds are more than the {LIMIT:,} of all tests")
    return found


def says_why(source: str) -> bool:
    return "pytest.mark.slow(" in source or "CPU seconds" in (ast.get_docstring(ast.parse(source)) or "")
