"""The one thread that uses the device: torch's mps does not bear two."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class OnDevice:
    """A thread of its own, and the work that waits for it. A subclass starts the thread, and has `_run`."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def run(self, function: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._work.put(call)
        return future

    def _run(self) -> None:
        """Does the work until None comes."""
        raise NotImplementedError
