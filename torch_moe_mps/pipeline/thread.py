"""Jobs on the first process of a pipeline, one at a time: its `generate` leads those of the others."""

import queue
from typing import Any

from ..serving.engine.job import Job, Reason, prompt_length
from ..serving.engine.loop import DeviceThread, Work
from ..serving.engine.memory import Memory, is_short, is_watched
from ..serving.engine.own_generate import Tokens, settings_of
from ..transformers.basics.scoped import Seeded
from .generating import Generating
from .speculation import print_counts


class PipelineThread(DeviceThread):
    """A `Generator` of one job at a time.

    Args:
        model: its `generate` leads the other processes.
        answering: generates in each process, and caches prefixes.
        memory: the budget of the model; None is none.
    """

    most = 1

    def __init__(self, model: Any, answering: Generating, memory: Memory | None = None):
        super().__init__(answering.prompts)
        self._model, self._answering, self.memory = model, answering, memory
        self.active = self.waiting = self.read_tokens = self.cached_tokens = 0
        self._current: Job | None = None
        self._thread.start()

    @property
    def draft_tokens(self) -> tuple[int, int]:
        speculation = self._answering.speculation
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
        self._answering.end()
        super().close()

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
        length, tokens = prompt_length(job.inputs), Tokens(job)
        self.read_tokens += length
        job.tell(0, length)
        inputs, settings = settings_of(self._model, job)
        with Seeded(self._model.device, job.own_seed):
            self._model.generate(**inputs, **settings, streamer=tokens)
        if tokens.is_complete:
            return "stop"
        return "cancelled" if job.is_cancelled or self._closed else "length"
