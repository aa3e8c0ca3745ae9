"""Work of a request that may take long: calls that have limits, such as xgrammar's, and turns of reading."""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_LATE = 4  # calls that go on behind their limit
_COMPUTES, _RESTS = 0.0005, 0.002  # seconds of long work, and of a rest behind them
BESIDE = max(1, (os.cpu_count() or 1) // 4)  # threads of long work: answers have the other cores


class TooLong(Exception):
    """A call was not done within its limit."""


class Limited:
    """Calls on threads beside, which are kept: a thread that begins waits for its turn on a busy core. A call
    that takes too long goes on there until it ends by itself.
    """

    def __init__(self) -> None:
        self._idle, self._late = list[_Beside](), list[_Beside]()
        weakref.finalize(self, _leave, self._idle)

    @property
    def is_busy(self) -> bool:
        """Whether so many calls are late that no other should begin."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return len(self._late) >= _MOST_LATE

    def call(self, function: Callable[[], T], seconds: float) -> tuple[T, float]:
        """Result of a function, and the seconds that its thread computed.

        Raises: TooLong, and what the function raises.
        """
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _Beside()
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


class _Beside(threading.Thread):
    """A thread that calls one function after the other, until None comes."""

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


def _leave(threads: list[_Beside]) -> None:
    for thread in threads:
        thread.calls.put(None)


class Turns:
    """Turns of threads with work of a request: a few have one at a time, as each takes Python's lock from the
    answers. Short work has turns of its own, so that it waits for none that is long.

    Args:
        is_busy: whether answers are generated.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._long, self._short = threading.Semaphore(BESIDE), threading.Semaphore(BESIDE)
        self._own, self._is_busy = threading.local(), is_busy
        self._lock, self._last = threading.Lock(), 0.0  # when the last rest ends

    def rest(self) -> None:
        """Lets the answers go on if this thread has computed for a while, in a turn or a pause of one: theirs
        waits for Python's lock several times a token, each time for all that compute. Threads that rest go on
        one after the other.
        """
        now = time.perf_counter()
        if self._rested is not None and now - self._rested > _COMPUTES:
            if self._is_busy():
                with self._lock:
                    self._last = ends = max(self._last, now) + _RESTS
                time.sleep(ends - now)
            self._own.rested = time.perf_counter()

    @contextlib.contextmanager
    def turn(self, is_long: bool = True) -> Iterator[None]:
        """Block with a turn of this thread, which waits for it unless it has one; a short one is given back
        for a long one.
        """
        wanted = self._long if is_long else self._short
        has_one = self._held in (wanted, self._long)
        with contextlib.nullcontext() if has_one else self._having(wanted), self._resting():
            yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Block that waits for something else, in which another thread has this one's turn."""
        with self._having(None), self._resting():
            yield

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Block in which this thread rests where it has computed for a while."""
        before = self._rested
        if before is None:
            self._own.rested = time.perf_counter()
        try:
            yield
        finally:
            if before is None:
                self._own.rested = None

    @contextlib.contextmanager
    def _having(self, wanted: threading.Semaphore | None) -> Iterator[None]:
        before = self._held
        self._change(before, wanted)
        try:
            yield
        finally:
            self._change(wanted, before)

    def _change(self, before: threading.Semaphore | None, wanted: threading.Semaphore | None) -> None:
        if before is not None:
            before.release()
        if wanted is not None:
            wanted.acquire()
        self._own.held = wanted

    @property
    def _held(self) -> threading.Semaphore | None:
        return getattr(self._own, "held", None)

    @property
    def _rested(self) -> float | None:
        """When this thread has rested; None outside of turns."""
        return getattr(self._own, "rested", None)
