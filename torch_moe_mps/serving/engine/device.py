"""The one thread that uses the device: torch's mps does not bear two."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from ..._text import first_line
from ..prefix_cache.disk import Disk
from ..prefix_cache.memory import PrefixCache
from .job import Job

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Died(RuntimeError):
    """The thread of the device has ended by an error: nothing is generated any more."""


class Work(NamedTuple):
    """Something to do on the thread, and what is told where it cannot be done."""

    do: Callable[[], None]
    refuse: Callable[[Exception], object]


class OnDevice:
    """A thread of its own, and the work that waits for it. A subclass starts the thread, and has `_run`.

    Args:
        prompts: that are kept; None keeps none.

    Attributes:
        death: why the thread has ended, if an error has ended it: all jobs end by that, later ones, too.
    """

    def __init__(self, prompts: PrefixCache | None) -> None:
        self._prompts = prompts
        self.death: Died | None = None
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._live, name="device", daemon=True)

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
            if self.death is not None:
                future.set_exception(self.death)
            elif self._closed:
                future.cancel()
            else:
                self._work.put(Work(call, future.set_exception))
        return future

    def prompts_held(self) -> tuple[int, int]:
        kept = [] if self._prompts is None else [*self._prompts.kept]
        return len(kept), sum(prompt.octets for prompt in kept)

    @property
    def disk(self) -> Disk | None:
        return None if self._prompts is None else self._prompts.disk

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            kind = f"{type(error).__name__}: {first_line(error)}"
            logger.critical("torch_moe_mps: the thread of the device has died: %s", kind, exc_info=error)
            with self._lock:
                self._closed = True
                self.death = death = Died(f"torch_moe_mps: the thread of the device has died: {kind}")
            while not self._work.empty():
                if (work := self._work.get()) is not None:
                    work.refuse(death)
            for job in self._jobs():
                job.end(death)

    def _run(self) -> None:
        """Does the work until None comes."""
        raise NotImplementedError

    def _jobs(self) -> list[Job]:
        """Jobs that have begun or wait on the thread, and have not ended."""
        raise NotImplementedError
