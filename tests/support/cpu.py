"""The CPU seconds of a test run: a line at its end, and with `--cpu FILE` a table of files and tests.

Counted are user and system time of pytest, its workers, and the processes that tests start and wait for.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from . import processes

LIMIT = 1_000  # of all tests that run for every change


class Table:
    """CPU seconds of each test, fixtures and other processes included."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.forked = 0.0  # of processes that are no children of pytest or its workers
        self._before = spent()

    def since_last(self) -> tuple[float, float]:
        """Seconds of this process since the last call: all, and those of forked processes."""
        before, self._before = self._before, spent()
        return self._before[0] - before[0], self._before[1] - before[1]

    def text(self, seconds: float) -> str:
        files: Counter[str] = Counter()
        for test, value in self.tests.items():
            files[test.partition("::")[0]] += value
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
    TABLE.tests[report.nodeid] += report.cpu_seconds
    TABLE.forked += report.cpu_seconds_forked


def pytest_terminal_summary(terminalreporter, config):
    seconds = sum(os.times()[:4]) + TABLE.forked  # the workers have ended
    terminalreporter.write_line(f"{seconds:,.0f} CPU seconds; all tests have {LIMIT:,}")
    if path := config.getoption("cpu"):
        Path(path).write_text(TABLE.text(seconds))
