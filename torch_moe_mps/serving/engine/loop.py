"""The device thread and its loop. torch's MPS backend is not safe to use from two threads."""

import logging
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..._text import first_line
from ...transformers.trials.batching import reason_for_order
from ..prefix_cache.disk import Disk
from ..prefix_cache.memory import PrefixCache
from ..speculative.drafting import Drafting
from .encoder import NO_TEXT
from .engine import Engine
from .job import Counts, Job
from .memory import Memory, is_short, is_watched

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DeviceThreadError(RuntimeError):
    """Raised to callers after the device thread has crashed."""


class Work(NamedTuple):
    """A callable for the device thread, and the callback for the error if it cannot run."""

    do: Callable[[], None]
    refuse: Callable[[Exception], object]


class DeviceThread(ABC):
    """Runs submitted callables on the only thread that may use the device. A subclass starts the thread.

    Args:
        prompts: the prefix cache; None disables it.

    Attributes:
        max_sequences: maximum number of jobs that run concurrently.
        memory: the memory budget; None is no limit.
        death: the error that ended the thread, if any; current and later jobs end with it.
    """

    max_sequences = 1
    memory: Memory | None = None

    def __init__(self, prompts: PrefixCache | None) -> None:
        self._prompts = prompts
        self.death: DeviceThreadError | None = None
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._live, name="device", daemon=True)

    @property
    def counts(self) -> Counts:
        return Counts()

    @property
    def mtp_layers(self) -> int:
        """Number of MTP layers of the checkpoint."""
        return 0

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queues a job and returns at once. After `close` it is cancelled; after a crash it fails."""

    def run(self, function: Callable[[], T]) -> "Future[T]":
        """Schedules a function on the device thread, between two steps."""
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

    def close(self) -> None:
        """Cancels all jobs within a step, writes the prefix cache's files, and joins the thread."""
        with self._lock:
            self._closed = True
            self._work.put(None)
        self._thread.join()

    def prompts_held(self) -> tuple[int, int]:
        """Number of cached prefixes, and their bytes."""
        kept = [] if self._prompts is None else [*self._prompts.kept]
        return len(kept), sum(prompt.nbytes for prompt in kept)

    @property
    def disk(self) -> Disk | None:
        """The prefix cache on a disk."""
        return None if self._prompts is None else self._prompts.disk

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            kind = f"{type(error).__name__}: {first_line(error)}"
            logger.critical("torch_moe_mps: the thread of the device has died: %s", kind, exc_info=error)
            with self._lock:
                self._closed = True
                self.death = death = DeviceThreadError(
                    f"torch_moe_mps: the thread of the device has died: {kind}"
                )
            while not self._work.empty():
                if (work := self._work.get()) is not None:
                    work.refuse(death)
            for job in self._jobs():
                job.end(death)

    def _run(self) -> None:
        """Runs submitted work until None comes."""
        while (work := self._work.get()) is not None:
            work.do()

    def _jobs(self) -> list[Job]:
        """Unfinished jobs of the thread."""
        return []


class EncoderThread(DeviceThread):
    """Device thread of a model that only encodes: functions run, jobs are refused."""

    def __init__(self) -> None:
        super().__init__(None)
        self._thread.start()

    def submit(self, job: Job) -> None:
        job.end(self.death or ValueError(f"torch_moe_mps: {NO_TEXT}"))


class EngineThread(DeviceThread):
    """A device thread that runs an `Engine`.

    Args:
        model: a transformers model in one process.
        prefix_cache: None disables prefix caching.
        max_sequences: maximum number of concurrent jobs.
        memory: budget for caches and cached prefixes; None is no limit.
        drafting: speculative decoding; None disables it.
    """

    def __init__(
        self,
        model: Any,
        prefix_cache: PrefixCache | None,
        max_sequences: int,
        memory: Memory | None = None,
        drafting: Drafting | None = None,
    ):
        super().__init__(prefix_cache)
        self.max_sequences, self.memory = max_sequences, memory
        room = None if memory is None else memory.free
        self._engine = Engine(model, prefix_cache, max_sequences, room, self._take_work, drafting)
        self._submitted = 0
        if not self._engine.abilities.reads_whole:  # trials that would hold the first answers up
            _ = self._engine.abilities.not_batchable
            if drafting is not None and max_sequences > 1:
                reason_for_order(model)
        self._thread.start()

    @property
    def mtp_layers(self) -> int:
        drafting = self._engine.drafts.drafting
        return 0 if drafting is None else drafting.layers

    @property
    def counts(self) -> Counts:
        engine, drafting = self._engine, self._engine.drafts.drafting
        counts = replace(engine.counts, active=engine.active, waiting=len(engine.waiting) + self._submitted)
        if drafting is not None:
            counts.accepted, counts.rejected = drafting.accepted, drafting.rejected
        return counts

    def submit(self, job: Job) -> None:
        def take() -> None:
            self._submitted -= 1
            self._engine.submit(job)

        with self._lock:
            is_late = self._closed
            if not is_late:
                self._submitted += 1
                self._work.put(Work(take, job.end))
        if is_late:
            job.end(self.death or "cancelled")

    def _run(self) -> None:
        prefix_cache = self._prompts
        while self._take_work():
            if self._engine.has_work:
                self._engine.step()
            if prefix_cache is not None:
                self._engine.run(partial(prefix_cache.store, is_short(self.memory)))
        self._engine.end_all()
        if prefix_cache is not None:
            prefix_cache.close()
        if self.counts.accepted + self.counts.rejected:
            print(self._engine.drafts.drafting, file=sys.stderr)

    def _jobs(self) -> list[Job]:
        return [sequence.job for sequence in self._engine.pool.sequences]

    def _take_work(self) -> bool:
        """Runs queued work, blocking while the engine is idle. Returns: False after `close`."""
        prefix_cache = self._prompts
        while not self._closed:
            pause = None if prefix_cache is None else prefix_cache.pause(is_watched(self.memory))
            try:
                work = self._work.get(not self._engine.has_work, pause)
            except queue.Empty:
                return True
            if work is not None:
                work.do()
        while True:  # everything that came before the end
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return False
            if work is not None:
                work.do()
