"""Calls that may take any time, such as xgrammar's: each has a limit, and nobody waits for it longer."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_MOST_LATE = 4  # calls that go on behind their limit


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
