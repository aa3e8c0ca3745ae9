"""Work of a request that may take long: calls that have limits, such as xgrammar's, and turns of reading."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_MOST_LATE = 4  # calls that go on behind their limit
BESIDE = max(1, (os.cpu_count() or 1) // 4)  # threads of long work: answers have the other cores


class TooLong(Exception):
    """A call was not done within its limit."""


class Limited:
    """Calls on threads of their own. One that takes too long goes on there until it ends by itself."""

    def __init__(self) -> None:
        self._late: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether so many calls are late that no other should begin."""
        self._late = [thread for thread in self._late if thread.is_alive()]
        return len(self._late) >= _MOST_LATE

    def call(self, function: Callable[[], T], seconds: float) -> tuple[T, float]:
        """Result of a function, and the seconds that its thread computed.

        Raises: TooLong, and what the function raises.
        """
        done: Future[tuple[T, float]] = Future()

        def run() -> None:
            try:
                begun = time.thread_time()
                done.set_result((function(), time.thread_time() - begun))
            except BaseException as error:
                done.set_exception(error)

        thread = threading.Thread(target=run, name="limited", daemon=True)
        thread.start()
        thread.join(seconds)
        if not done.done():
            self._late.append(thread)
            raise TooLong
        return done.result()


class Turns:
    """Turns of threads with work of a request: a few have one at a time, as each takes Python's lock from the
    answers. Short work has turns of its own, so that it waits for none that is long.
    """

    def __init__(self) -> None:
        self._long, self._short = threading.Semaphore(BESIDE), threading.Semaphore(BESIDE)
        self._own = threading.local()

    @contextlib.contextmanager
    def turn(self, is_long: bool = True) -> Iterator[None]:
        """Block with a turn of this thread, which waits for it unless it has one; a short one is given back
        for a long one.
        """
        wanted = self._long if is_long else self._short
        with contextlib.nullcontext() if self._held in (wanted, self._long) else self._having(wanted):
            yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Block that waits for something else, in which another thread has this one's turn."""
        with self._having(None):
            yield

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
