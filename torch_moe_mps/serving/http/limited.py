"""Time limits for calls that cannot be interrupted, such as xgrammar's."""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
BESIDE = max(1, (os.cpu_count() or 1) // 4)  # threads of long work: answers have the other cores
_MOST_LATE = 4  # calls that go on behind their limit


class TooLong(Exception):
    """Raised if a call exceeds its time limit."""


class Limited:
    """Thread pool that calls functions with a time limit.

    Threads are reused, as starting one is slow on a busy core. A call beyond its limit continues in the
    background.
    """

    def __init__(self) -> None:
        self._idle, self._late = list[_Thread](), list[_Thread]()
        weakref.finalize(self, _leave, self._idle)

    @property
    def is_busy(self) -> bool:
        """True if too many calls are past their limits to start another."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return len(self._late) >= _MOST_LATE

    def call(self, function: Callable[[], T], seconds: float) -> tuple[T, float]:
        """(result of a function, CPU seconds of its thread).

        Raises: TooLong, and exceptions of the function.
        """
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _Thread()
        thread.calls.put(function)
        try:
            result, error, computed = thread.results.get(timeout=seconds)
        except queue.Empty:
            thread.calls.put(None)
            self._late.append(thread)
            raise TooLong from None
        self._idle.append(thread)
        try:
            if error is not None:
                raise error
            return result, computed
        finally:
            del error  # its traceback has this frame


class _Thread(threading.Thread):
    """Worker thread that runs submitted functions until it gets None."""

    def __init__(self) -> None:
        super().__init__(name="limited", daemon=True)
        self.calls, self.results = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        self.start()

    def run(self) -> None:
        while (function := self.calls.get()) is not None:
            begun, result, error = time.thread_time(), None, None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            self.results.put((result, error, time.thread_time() - begun))
            del function, result, error


def _leave(threads: list[_Thread]) -> None:
    for thread in threads:
        thread.calls.put(None)
