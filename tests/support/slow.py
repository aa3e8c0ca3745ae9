"""The time of a test: one that takes long says why, with `@pytest.mark.slow("why")`.

Counted are the CPU seconds of the test's own process in its call: neither fixtures, nor other processes (a
compiler, a command), nor what only a first run does: imports, and pieces that the simulator builds and keeps.
"""

import contextlib
import functools
import importlib.machinery
import time
from collections.abc import Iterator

import pytest
from simulator import build

LIMIT = 1.5  # CPU seconds, where nothing else runs
MARGIN = 2  # how much longer the same takes on a busy machine


class FirstTimes:
    """CPU seconds of this process that imports took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self, loader: type) -> None:
        """Count what `loader` executes from here on."""
        execute = loader.exec_module

        @functools.wraps(execute)
        def exec_module(own, module):
            if self._inside:
                return execute(own, module)
            self._inside, started = True, time.process_time()
            try:
                return execute(own, module)
            finally:
                self._inside = False
                self.seconds += time.process_time() - started

        loader.exec_module = exec_module


IMPORTS = FirstTimes()
IMPORTS.watch(importlib.machinery.SourceFileLoader)


@contextlib.contextmanager
def own_seconds() -> Iterator[list[float]]:
    """A list that has the seconds of the block once it has ended."""

    def now() -> float:
        return time.process_time() - IMPORTS.seconds - build.spent.seconds

    seconds, started = [], now()
    try:
        yield seconds
    finally:
        seconds.append(now() - started)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test of the inner loop that takes long and does not say why; scripts/test only warns of it.

    Tests of the sweep take what they take.
    """
    with own_seconds() as seconds:
        result = yield
    marks = {mark.name for mark in item.iter_markers()}
    if seconds[0] > LIMIT * MARGIN and not marks & {"slow", "sweep"}:
        message = (
            f"took {seconds[0]:.1f} CPU seconds, {LIMIT} are allowed and {LIMIT * MARGIN:g} forgiven: make "
            f'it smaller, or mark it @pytest.mark.slow("why")'
        )
        if item.config.getoption("slow_fails"):
            pytest.fail(message, pytrace=False)
        item.warn(pytest.PytestWarning(f"{item.nodeid} {message}"))
    return result
