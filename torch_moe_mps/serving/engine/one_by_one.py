"""Jobs by the model's own `generate`: with kept prompts, draft tokens and beams, and in a pipeline."""

import queue

from .generating import Generating
from .job import Job, Reason
from .loop import DeviceThread, Work
from .memory import Memory, is_short, is_watched
from .own_generate import generate_alone
from .speculation import print_counts


class OneByOne(DeviceThread):
    """A `Generator` of one job at a time.

    Args:
        answering: stands for the model, and keeps prompts; in a pipeline the model asks it. None for a model
            that generates nothing.
        memory: the budget of the model; None is none.
    """

    most = 1

    def __init__(self, answering: Generating | None, memory: Memory | None = None):
        super().__init__(None if answering is None else answering.prompts)
        self._answering, self.memory = answering, memory
        self.active = self.waiting = self.read_tokens = self.cached_tokens = 0
        self._current: Job | None = None
        self._thread.start()

    @property
    def draft_tokens(self) -> tuple[int, int]:
        speculation = None if self._answering is None else self._answering.speculation
        if speculation is None:
            return 0, 0
        return speculation.accepted, speculation.drafted - speculation.accepted

    def submit(self, job: Job) -> None:
        with self._lock:
            self.waiting += 1
            is_late = self._closed
            if not is_late:
                self._work.put(Work(lambda: self._begin(job), job.end))
        if is_late:
            self.waiting -= 1
            job.end(self.death or "cancelled")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._work.put(None)
        if self._answering is not None:
            self._answering.end()
        self._thread.join()

    def _run(self) -> None:
        prompts = self._prompts
        while True:
            try:
                work = self._work.get(
                    timeout=None if prompts is None else prompts.pause(is_watched(self.memory))
                )
            except queue.Empty:
                if prompts:
                    prompts.store(is_short(self.memory))
                continue
            if work is None:
                break
            work.do()
        if self._answering is not None:
            self._answering.write()
            print_counts(self._answering.speculation)

    def _begin(self, job: Job) -> None:
        with self._lock:
            self.waiting -= 1
            self.active += 1
        self._current = job
        try:
            reason: Reason | Exception = "cancelled"
            if not (job.is_cancelled or self._closed):
                reason = self._generate(job)
        except Exception as error:
            reason = error
        self.active -= 1
        self._current = None
        job.end(reason)

    def _jobs(self) -> list[Job]:
        return [] if self._current is None else [self._current]

    def _generate(self, job: Job) -> Reason:
        assert self._answering is not None

        def began(cached: int, read: int) -> None:
            self.cached_tokens += cached
            self.read_tokens += read

        return generate_alone(self._answering, job, lambda: job.is_cancelled or self._closed, began)
