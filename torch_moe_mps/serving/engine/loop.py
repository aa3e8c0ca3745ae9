"""The device thread and its loop. torch's MPS backend is not safe to use from two threads."""

import contextlib
import heapq
import itertools
import logging
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..._text import first_line
from ...models.programs import reason_for_order
from ..prefix_cache.disk import Disk
from ..prefix_cache.memory import PrefixCache
from .drafting import Drafting
from .engine import Engine
from .job import Counts, Job, Reason
from .memory import Memory, is_short, is_watched

logger = logging.getLogger(__name__)
_JOBS = 4  # submitted before a step, at most: each is checked while the sequences wait


class DeviceThreadError(RuntimeError):
    """Raised to callers after the device thread has crashed."""


class EngineThread:
    """An `Engine` on the only thread that may use the device. Its methods may be called from any thread.

    Args:
        model: a transformers model in one process.
        prefix_cache: None disables prefix caching.
        max_sequences: maximum number of concurrent jobs.
        memory: budget for caches and cached prefixes; None is no limit.
        drafting: speculative decoding; None disables it.

    Attributes:
        death: the error that ended the thread, if any; current and later jobs end with it.
        on_death: called on the thread after that.
    """

    def __init__(
        self,
        model: Any,
        prefix_cache: PrefixCache | None,
        max_sequences: int,
        memory: Memory | None = None,
        drafting: Drafting | None = None,
    ):
        self.max_sequences, self.memory, self._prompts = max_sequences, memory, prefix_cache
        self.death: DeviceThreadError | None = None
        self.on_death: Callable[[], None] = lambda: None
        room = None if memory is None else memory.free
        self._engine = Engine(model, prefix_cache, max_sequences, room, drafting)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._queued, self._arrivals = list[tuple[int, int, Job]](), itertools.count()  # a heap
        self._lock, self._closed = threading.Lock(), False
        if not self._engine.abilities.reads_whole:  # trials that would hold the first answers up
            _ = self._engine.abilities.not_batchable
            if drafting is not None and max_sequences > 1:
                reason_for_order(model)
        self._thread = threading.Thread(target=self._live, name="device", daemon=True)
        self._thread.start()

    @property
    def mtp_layers(self) -> int:
        """Number of MTP layers of the checkpoint."""
        drafting = self._engine.drafts.drafting
        return 0 if drafting is None else drafting.layers

    @property
    def counts(self) -> Counts:
        engine, drafting = self._engine, self._engine.drafts.drafting
        waiting = len(engine.waiting) + len(self._queued) + self._jobs.qsize()
        counts = replace(engine.counts, active=engine.active, waiting=waiting)
        if drafting is not None:
            counts.accepted, counts.rejected = drafting.accepted, drafting.rejected
        return counts

    def submit(self, job: Job) -> None:
        """Queues a job and returns at once. After `close` it is cancelled; after a crash it fails."""
        with self._lock:
            is_late = self._closed
            if not is_late:
                self._jobs.put(job)
        if is_late:
            job.end(self.death or "cancelled")

    def close(self) -> None:
        """Cancels all jobs within a step, writes the prefix cache's files, and joins the thread."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def prompts_held(self) -> tuple[int, int]:
        """Number of cached prefixes, and their bytes."""
        kept = [] if self._prompts is None else [*self._prompts.kept]
        return len(kept), sum(prompt.nbytes for prompt in kept)

    @property
    def disk(self) -> Disk | None:
        """The prefix cache on a disk."""
        return None if self._prompts is None else self._prompts.disk

    # On the thread

    def _live(self) -> None:
        """Runs the thread. An error that ends it becomes the end of all jobs, running and queued."""
        try:
            self._run()
        except BaseException as error:
            kind = f"{type(error).__name__}: {first_line(error)}"
            trace = None if isinstance(error, torch.AcceleratorError) else error  # a GPU's is nobody's code
            logger.critical("torch_moe_mps: the thread of the device has died: %s", kind, exc_info=trace)
            with self._lock:
                self._closed = True
                self.death = death = DeviceThreadError(
                    f"torch_moe_mps: the thread of the device has died: {kind}"
                )
            for job in [sequence.job for sequence in self._engine.pool.sequences]:
                job.end(death)
            self._end_queued(death)
            with contextlib.suppress(Exception):  # queued parts of prefixes are written
                if self._prompts is not None:
                    self._prompts.close()
            self.on_death()

    def _run(self) -> None:
        prefix_cache = self._prompts
        while self._take_jobs():
            if self._engine.has_work:
                self._engine.step()
            if prefix_cache is not None:
                self._engine.run(partial(prefix_cache.store, is_short(self.memory)))
        self._engine.end_all()
        self._end_queued("cancelled")
        if prefix_cache is not None:
            prefix_cache.close()
        if self.counts.accepted + self.counts.rejected:
            print(self._engine.drafts.drafting, file=sys.stderr)

    def _take_jobs(self) -> bool:
        """Submits a few queued jobs to the engine, blocking while it is idle. Returns: False after `close`.

        First answers to requests precede later ones: a request does not wait for all answers to another.
        """
        prefix_cache = self._prompts
        while not self._closed:
            pause = None if prefix_cache is None else prefix_cache.pause(is_watched(self.memory))
            try:
                job = self._jobs.get(not (self._engine.has_work or self._queued), pause)
            except queue.Empty:
                break
            if job is not None:
                heapq.heappush(self._queued, (job.place, next(self._arrivals), job))
        for _ in range(min(_JOBS, len(self._queued))):
            self._engine.submit(heapq.heappop(self._queued)[-1])
        return not self._closed

    def _end_queued(self, reason: Reason | Exception) -> None:
        """Ends the jobs that were not submitted to the engine."""
        jobs = [job for _, _, job in sorted(self._queued)]
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                jobs.append(job)
        self._queued.clear()
        for job in jobs:
            job.end(reason)
