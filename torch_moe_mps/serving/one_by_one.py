"""Jobs in turn, as `Generating` generates them: with kept prompts and guessed tokens, and in a pipeline."""

from typing import Any

import torch
from torch import Tensor

from .device import OnDevice
from .generating import Generating
from .job import Job, Reason, prompt_length
from .speculation import print_counts


class OneByOne(OnDevice):
    """A `Generator` of one job at a time.

    Args:
        model: generates, and has a `generate` of its own where its layers are spread over processes.
        answering: keeps prompts; in a pipeline the model asks it. None for a model that generates nothing.
    """

    most = 1

    def __init__(self, model: Any, answering: Generating | None):
        super().__init__()
        self._model, self._answering = model, answering
        self._leads = hasattr(model, "pipeline")
        self.active = self.waiting = self.read_tokens = self.cached_tokens = 0
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._lock:
            self.waiting += 1
            is_late = self._closed
            if not is_late:
                self._work.put(lambda: self._begin(job))
        if is_late:
            self.waiting -= 1
            job.on_end("cancelled")

    def prompts_held(self) -> tuple[int, int]:
        prompts = None if self._answering is None else self._answering.prompts
        kept = [] if prompts is None else [*prompts.kept]
        return len(kept), sum(prompt.nbytes() for prompt in kept)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._work.put(None)
        if self._answering is not None:
            self._answering.end()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        if self._answering is not None:
            self._answering.write()
            print_counts(self._answering.speculation)

    def _begin(self, job: Job) -> None:
        with self._lock:
            self.waiting -= 1
            self.active += 1
        try:
            reason: Reason | Exception = "cancelled"
            if not (job.is_cancelled or self._closed):
                reason = self._generate(job)
        except Exception as error:
            reason = error
        self.active -= 1
        job.on_end(reason)

    def _generate(self, job: Job) -> Reason:
        assert self._answering is not None
        config, length = job.config, prompt_length(job.inputs)
        tokens, told = _Tokens(job), False

        def ends() -> bool:
            return job.is_cancelled

        def progress(read: int, of: int) -> None:
            nonlocal told
            if not told:
                told, job.cached_tokens = True, read
                self.cached_tokens += read
                self.read_tokens += of - read
            job.on_progress(read, of)

        if job.seed is not None:
            torch.manual_seed(job.seed)
        inputs = {name: value.to(self._model.device) for name, value in job.inputs.items()}
        more: dict[str, Any] = {"generation_config": config}
        if job.processors:
            more["logits_processor"] = job.processors
        if hasattr(self._model, "has_talker"):  # it would speak, too
            more["generation_mode"] = "text"
        if self._leads:  # other processes generate the same, and know of no functions
            progress(0, length)
            self._model.generate(**inputs, **more, streamer=tokens)
        elif (config.num_beams or 1) > 1:  # there is nothing to show before the end
            result = self._answering.generate(**inputs, **more, ends=ends, progress=progress)
            tokens.put(inputs["input_ids"])
            tokens.put(result[0, length:])
        else:
            self._answering.generate(**inputs, **more, ends=ends, progress=progress, streamer=tokens)
        if tokens.is_complete:
            return "stop"
        if tokens.count >= config.max_new_tokens:
            return "length"
        return "cancelled" if job.is_cancelled or self._closed else "stop"


class _Tokens:
    """A streamer that hands tokens to a job.

    Attributes:
        ended: whether no token is wanted any more.
        is_complete: whether the answer has ended by a token of its own or a stop.
    """

    def __init__(self, job: Job):
        last = job.config.eos_token_id
        self._last = set(last) if isinstance(last, list) else {last}
        self._job, self._is_prompt = job, True
        self.count, self.is_complete = 0, False

    @property
    def ended(self) -> bool:
        return self.is_complete or self._job.is_cancelled

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.reshape(-1).tolist():
            if self.ended or self.count >= self._job.config.max_new_tokens:
                return
            self.count += 1
            self.is_complete = self._job.on_token(token) or token in self._last

    def end(self) -> None:
        """The job is told by the thread."""
