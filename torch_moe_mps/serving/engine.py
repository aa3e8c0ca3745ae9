"""A `Generator` of several jobs at a time: a `Batch` on a thread of its own, the only one on the device."""

import queue
import sys
from typing import Any

from ..transformers.key_order import reason_against_rows, reason_for_order
from .batch import Batch
from .device import OnDevice, Work
from .guesses.guessing import Guessing
from .job import Job
from .memory import Memory, is_short, is_watched
from .prompts import Prompts


class Engine(OnDevice):
    """Generates jobs together.

    Args:
        model: of transformers; in a pipeline, jobs are generated one by one instead (`OneByOne`).
        prompts: keeps what was computed; None keeps nothing.
        most: jobs at once.
        memory: the budget of their caches and the kept prompts; None is no limit.
        guesses: of tokens; None guesses none.

    Raises: ValueError for a model in a pipeline.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts | None,
        most: int,
        memory: Memory | None = None,
        guesses: Guessing | None = None,
    ):
        super().__init__(prompts)
        self.most, self.memory = most, memory
        room = None if memory is None else memory.free
        self._batch = Batch(model, prompts, most, room, self._take_work, guesses)
        self._submitted = 0
        if not self._batch.reads_whole:  # trials that would hold the first answers up
            reason_against_rows(model)
            if guesses is not None and most > 1:
                reason_for_order(model)
        self._thread.start()

    @property
    def layers_that_guess(self) -> int:
        """How many layers of the checkpoint guess for the model."""
        return 0 if self._batch.guesses is None else self._batch.guesses.layers

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
    def guessed_tokens(self) -> tuple[int, int]:
        guesses = self._batch.guesses
        return (0, 0) if guesses is None else (guesses.accepted, guesses.rejected)

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
        if sum(self.guessed_tokens):
            print(self._batch.guesses, file=sys.stderr)

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
