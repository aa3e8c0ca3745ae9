"""Threads that read: a process may end while they wait for a disk."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class _Call(NamedTuple):
    future: Future
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Threads:
    """Daemon threads that run calls in order. Those of concurrent.futures are joined where a process ends."""

    def __init__(self, count: int, name: str):
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._count, self._is_closed = count, False
        for number in range(count):  # all at once: an interrupt leaves none half started
            threading.Thread(target=_run, args=(self._calls,), name=f"{name} {number}", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """A call. Raises: RuntimeError if the threads are closed."""
        if self._is_closed:
            raise RuntimeError("the file of experts is closed")
        future: Future = Future()
        self._calls.put(_Call(future, function, arguments))
        return future

    def close(self) -> None:
        """Cancels calls that have not begun, and ends each thread behind its own."""
        self._is_closed = True
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call.future.cancel()
        for _ in range(self._count):
            self._calls.put(None)


def _run(calls: "SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        if call.future.set_running_or_notify_cancel():
            try:
                result = call.function(*call.arguments)
            except BaseException as error:
                call.future.set_exception(error)
            else:
                call.future.set_result(result)
                del result
        del call  # its arguments are freed before the next one comes
