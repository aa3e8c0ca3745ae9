"""Jobs that run through `model.generate`: beam search, and models that override it."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

from ..._faults import Mark, raise_fault, synchronize
from ...transformers.basics.scoped import Seeded
from ...transformers.upstream.models import as_text
from .job import Job, Reason, prompt_length
from .prefill import turned, turning


def generate_alone(
    model: Any, job: Job, ends: Callable[[], bool] | None, step: Callable[[], None] | None = None
) -> Reason:
    """Runs a job through `model.generate`, without prefix caching. Returns: the reason of its end.

    Args:
        ends: called between tokens; True stops generation. None if it cannot be stopped.
        step: steps the other sequences, once per token; the GPU works on it while the host encodes a forward.

    Raises: ValueError for processors with `is_first`: `generate` calls its own before them.
    """
    if any(getattr(each, "is_first", False) for each in job.processors):
        kind = type(model).__name__
        raise ValueError(f"torch_moe_mps: logprobs must be left out for {kind}, which generates by itself")
    length, tokens, is_ended = prompt_length(job.inputs), Tokens(job), ends or (lambda: False)
    job.report_progress(0, length)
    with Seeded(model.device, job.own_seed) as numbers:

        def others_step() -> None:
            if step is not None:
                with numbers.outside():  # others may sample tokens meanwhile
                    step()

        steps = Steps(is_ended, others_step, tokens, model.device)
        has_beams = (job.config.num_beams or 1) > 1
        more: dict[str, Any] = {} if ends is None else {"stopping_criteria": [steps]}
        more |= _arguments(job) | ({} if has_beams else {"streamer": steps})
        with nullcontext() if step is None else _before_forwards(model, steps.before_forward):
            result = call_generate(model, job.inputs, job.config, **more)
        if has_beams:  # there is nothing to show before the end
            tokens.put(job.inputs["input_ids"])
            begun = 1 if model.config.is_encoder_decoder else length  # tokens in front of the answer
            tokens.put(getattr(result, "sequences", result)[0, begun:])
        if steps.error is not None:
            raise steps.error
    if tokens.is_complete:
        return "stop"
    return "cancelled" if job.is_cancelled or is_ended() else "length"


def _arguments(job: Job) -> dict[str, Any]:
    """Further arguments of `generate` for a job: logits processors and tokenizer."""
    made: dict[str, Any] = {"logits_processor": job.processors} if job.processors else {}
    return made | ({"tokenizer": job.tokenizer} if job.config.stop_strings else {})


def call_generate(model: Any, inputs: Mapping[str, Tensor], config: GenerationConfig, **more: Any) -> Any:
    """Result of `model.generate` for inputs on the CPU."""
    on_device = {name: value.to(model.device) for name, value in inputs.items()}
    with turned(turning(model), {}):
        return model.generate(**on_device, generation_config=config, **as_text(model), **more)


_PREPARES = "prepare_inputs_for_generation"


@contextmanager
def _before_forwards(model: Any, function: Callable[[], None]) -> Iterator[None]:
    """Context where `generate` calls a function before each forward of the model.

    The forward's inputs are prepared by then, so the host does not wait between the function and the forward.
    """
    own = model.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        inputs = own(*args, **kwargs)
        function()
        return inputs

    attributes = vars(model)
    before = attributes.get(_PREPARES)  # a user's own, or None
    attributes[_PREPARES] = prepare
    try:
        yield
    finally:
        del attributes[_PREPARES]
        if before is not None:
            attributes[_PREPARES] = before


class Tokens:
    """A streamer that passes tokens to a job.

    Attributes:
        ended: True if the job takes no more tokens.
        is_complete: True if the answer ended by an end token or a stop string.
    """

    def __init__(self, job: Job):
        last = job.config.eos_token_id
        self._last = set(last) if isinstance(last, list) else {last}
        self._job, self._is_prompt = job, True
        self.is_complete = False

    @property
    def ended(self) -> bool:
        return self.is_complete or self._job.is_cancelled

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.reshape(-1).tolist():
            if self.ended:
                return
            self.is_complete = self._job.append(token) or token in self._last

    def end(self) -> None:
        """Does nothing: the engine ends the job."""


class Steps(StoppingCriteria):
    """Stopping criterion and streamer of `generate`, with steps of the other sequences.

    An error of the wrapped streamer stops generation regularly, with a consistent cache. A GPU fault is
    raised out of `generate`, as the cache is not consistent.

    Args:
        is_ended: returns True once the answer ends.
        step: steps the other sequences, once per token: before the forward, or between tokens if the model's
            `generate` prepares inputs of its forwards differently.
    """

    def __init__(
        self, is_ended: Callable[[], bool], step: Callable[[], None], streamer: Any, device: torch.device
    ):
        self.is_ended, self.step, self.streamer, self.device = is_ended, step, streamer, device
        self.error: Exception | None = None
        self._ends, self._has_stepped = False, False
        self._marks = deque[Mark]()  # tokens that are not shown yet

    def before_forward(self) -> None:
        if not self._ends:
            self._has_stepped = True
            self.step()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._marks.append(Mark(self.device))
        self._ends = self.is_ended() or self.error is not None or getattr(self.streamer, "ended", False)
        if not self._has_stepped and not self._ends:
            self.step()
        self._has_stepped = False
        return input_ids.new_full((len(input_ids),), self._ends).bool()

    def put(self, value: Tensor) -> None:
        if self._marks:  # transformers shows them late on mps, behind the next token's forward
            self._marks.popleft().wait()
        else:
            raise_fault()
        try:
            if self.error is None:
                self.streamer.put(value.reshape(-1))  # several tokens, where candidates were accepted
        except Exception as error:
            self.error = error

    def end(self) -> None:
        synchronize(self.device)
        if self.error is None and self.streamer is not None:
            self.streamer.end()
