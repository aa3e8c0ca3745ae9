"""A job by the model's own `generate`: beams, and models that have one of their own."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...transformers.basics.scoped import Seeded
from ...transformers.upstream.generation import as_text
from .generating import Generating
from .job import Job, Reason, prompt_length


def generate_alone(
    answering: Generating, job: Job, ends: Callable[[], bool], began: Callable[[int, int], None]
) -> Reason:
    """Generates a job by the model's own `generate`: in a pipeline, and with beams, too.

    Args:
        ends: asked between tokens, and between pieces of the prompt: whether the answer ends there.
        began: takes how many tokens of the prompt were kept, and how many are computed.
    """
    model, config, length = answering.model, job.config, prompt_length(job.inputs)
    tokens, told = _Tokens(job), False

    def progress(read: int, of: int) -> None:
        nonlocal told
        if not told:
            told, job.cached_tokens = True, read
            job.disk_tokens = min(read, answering.disk_tokens)
            began(read, of - read)
        job.tell(read, of)

    inputs: dict[str, Any] = {name: value.to(model.device) for name, value in job.inputs.items()}
    more: dict[str, Any] = {"generation_config": config, **as_text(model)}
    if job.processors:
        more["logits_processor"] = job.processors
    if config.stop_strings:
        more["tokenizer"] = job.tokenizer
    with Seeded(model.device, job.own_seed) as numbers:

        def ends_there() -> bool:
            with numbers.outside():  # others may draw tokens meanwhile
                return ends()

        own: dict[str, Any] = {"ends": ends_there, "progress": progress, "hashed": job.images}
        if hasattr(model, "pipeline"):  # other processes generate the same, and know of no functions
            progress(0, length)
            model.generate(**inputs, **more, streamer=tokens)
        elif (config.num_beams or 1) > 1:  # there is nothing to show before the end
            result = answering.generate(**inputs, **more, **own)
            tokens.put(inputs["input_ids"])
            begun = 1 if model.config.is_encoder_decoder else length  # tokens in front of the answer
            tokens.put(getattr(result, "sequences", result)[0, begun:])
        else:
            answering.generate(**inputs, **more, **own, streamer=tokens)
    if tokens.is_complete:
        return "stop"
    return "cancelled" if ends() else "length"


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
            self.is_complete = self._job.take(token) or token in self._last

    def end(self) -> None:
        """The job is told by the thread."""
