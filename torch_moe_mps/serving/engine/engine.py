"""A `Generator` of several jobs at a time: a `Batch` on a thread of its own, the only one on the device."""

import queue
import sys
from typing import Any

from ...transformers.trials.batching import reason_against_rows, reason_for_order
from ..prefix_cache.memory import PrefixCache
from ..speculative.drafting import Drafting
from .batch import Batch
from .device import OnDevice, Work
from .job import Job
from .memory import Memory, is_short, is_watched


class Engine(OnDevice):
    """Generates jobs together.

    Args:
        model: of transformers; in a pipeline, jobs are generated one by one instead (`OneByOne`).
        prompts: keeps what was computed; None keeps nothing.
        most: jobs at once.
        memory: the budget of their caches and the kept prompts; None is no limit.
        speculative: of tokens; None for none.

    Raises: ValueError for a model in a pipeline.
    """

    def __init__(
        self,
        model: Any,
        prompts: PrefixCache | None,
        most: int,
        memory: Memory | None = None,
        speculative: Drafting | None = None,
    ):
        super().__init__(prompts)
        self.most, self.memory = most, memory
        room = None if memory is None else memory.free
        self._batch = Batch(model, prompts, most, room, self._take_work, speculative)
        self._submitted = 0
        if not self._batch.reads_whole:  # trials that would hold the first answers up
            reason_against_rows(model)
            if speculative is not None and most > 1:
                reason_for_order(model)
        self._thread.start()

    @property
    def mtp_layers(self) -> int:
        """How many layers of the checkpoint draft for the model."""
        return 0 if self._batch.speculative is None else self._batch.speculative.layers

    @property
    def active(self) -> int:
        return self._batch.active

    @property
    def waiting(self) -> int:
        return len(self._batch.waiting) + self._submitted

    @property
    def read_tokens(self) -> int:
        return self._batch.read_tokens

    @property
    def cached_tokens(self) -> int:
        return self._batch.cached_tokens

    @property
    def draft_tokens(self) -> tuple[int, int]:
        speculative = self._batch.speculative
        return (0, 0) if speculative is None else (speculative.accepted, speculative.rejected)

    def submit(self, job: Job) -> None:
        def take() -> None:
            self._submitted -= 1
            self._batch.waiting.append(job)

        with self._lock:
            is_late = self._closed
            if not is_late:
                self._submitted += 1
                self._work.put(Work(take, job.end))
        if is_late:
            job.end(self.death or "cancelled")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        prompts = self._prompts
        while self._take_work():
            if self._batch.has_work:
                self._batch.step()
            if prompts is not None:
                prompts.store(is_short(self.memory))
        self._batch.end_all()
        if prompts is not None:
            prompts.write(self._batch.model)
        if sum(self.draft_tokens):
            print(self._batch.speculative, file=sys.stderr)

    def _jobs(self) -> list[Job]:
        return self._batch.jobs

    def _take_work(self) -> bool:
        """Does what was asked for; waits where there is nothing to generate. Returns: whether to go on."""
        prompts = self._prompts
        while not self._closed:
            pause = None if prompts is None else prompts.pause(is_watched(self.memory))
            try:
                work = self._work.get(not self._batch.has_work, pause)
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
