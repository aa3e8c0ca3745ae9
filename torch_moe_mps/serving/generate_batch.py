"""Continuous batching of a list of prompts."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from .._progress import Progress
from .engine.engine import Engine
from .engine.job import Job, Reason, as_errors
from .engine.memory import MOST_ROWS, Memory
from .engine.ranges import check_job
from .prefix_cache.memory import PrefixCache
from .speculative.asked import drafting_of

_NAME = "moe_mps::generate_batch"
_SHARE_OF_PROMPTS = 4  # the prefix cache's part of free memory


def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | str],
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Any = None,
    seed: int | Sequence[int | None] | None = None,
    logits_processor: Sequence[Sequence[LogitsProcessor]] | None = None,
    streamer: Sequence[Any] | None = None,
    speculative: Any = None,
    draft_width: int | None = None,
    progress: bool = True,
) -> list[Tensor]:
    """Generates answers to any number of prompts with continuous batching.

    A sequence is admitted as soon as a row is free, and leaves the batch when its answer is complete. Each
    answer equals that of `model.generate` up to rounding: kernels for several rows sum in another order.
    Common prefixes are computed once.

    Args:
        model: accelerated; its `generate` is not called. A model that cannot be batched (Unlimited-OCR) runs
            the prompts sequentially and logs the reason.
        prompts: N token tensors [T] or [1, T], or texts, which need `tokenizer`.
        generation_config: one for all or N: lengths, time limit, end tokens, `stop_strings` and sampling
            settings; None is the model's. As with `generate`, an answer has at most 20 tokens if no length is
            set. `num_beams` and `num_return_sequences` must be 1.
        tokenizer: for texts and stop strings.
        seed: one for each prompt, or a single number, to which prompt n adds n. Each answer has a private
            random generator, independent of the other answers and of torch's; without a seed it is seeded
            from the system's entropy.
        logits_processor: N lists of logits processors, one for each prompt.
        streamer: N objects with `put`, called with each generated token, and `end`; or None.
        speculative: the drafter: "lookup" for prompt lookup, "mtp" for MTP layers of the checkpoint, a draft
            model of the same vocabulary, a DFlash assistant, or an object with `draft(rows)` and
            `accepted(rows, counts)` (`serving/engine/drafter.py`); from a list, the first with draft
            tokens. Their number follows step times and acceptance rates. Answers equal those without
            speculative decoding up to rounding, also sampled ones with a seed. Models that cannot be batched,
            or must compute a prompt in one call, run without it and log that.
        draft_width: draft tokens per sequence and step, from 1 to 7; None is 4, while drafting pays.
        progress: shows the progress on stderr.

    Returns: N tensors of new tokens [M], on the CPU, in the order of the prompts, end tokens included.

    Raises: ValueError for invalid arguments, a prompt as long as `max_length`, which includes it, and a model
        in a pipeline or one that only its `generate` runs; exceptions of processors and streamers;
        torch.AcceleratorError if the GPU fails.
    """
    many = len(prompts)
    if isinstance(prompts, (str, Tensor)):
        raise ValueError(f"{_NAME}: prompts must be a list, got a {type(prompts).__name__}")
    configs = _each("generation_config", generation_config, many, GenerationConfig)
    seeds = _each("seed", seed, many, int)
    if isinstance(seed, int):
        seeds = [seed + number for number in range(many)]
    processors = _each("logits_processor", logits_processor, many, type(None))
    streamers = _each("streamer", streamer, many, type(None))
    kept = PrefixCache(Memory(model).free // _SHARE_OF_PROMPTS)
    drafting = drafting_of(model, speculative, kept, _NAME, draft_width)
    memory = Memory(model, beside=drafting.modules if drafting else ()).free
    engine = Engine(model, kept, MOST_ROWS, memory, drafting=drafting)
    answers, jobs = list[BatchAnswer](), list[Job]()
    with Progress("Generating", many, "answer", wanted=progress) as bar:
        for number, prompt in enumerate(prompts):
            config = copy.deepcopy(configs[number] or model.generation_config)
            ids = _ids(prompt, number, tokenizer)
            answer = BatchAnswer(ids[0].tolist(), config, tokenizer, streamers[number], bar.update)
            config.stop_strings = None  # the answer looks for them
            job_processors = [*(processors[number] or ())]
            job = Job(
                {"input_ids": ids},
                config,
                answer.take,
                answer.end,
                seed=seeds[number],
                processors=job_processors,
            )
            check_job(model, job)
            answers.append(answer)
            jobs.append(job)
        engine.submit(*jobs)
        generate_all(engine, answers)
    return [torch.tensor(answer.tokens, dtype=torch.int64) for answer in answers]


def generate_all(
    engine: Engine, answers: Sequence["BatchAnswer"], until: "BatchAnswer | None" = None
) -> None:
    """Steps the engine until all jobs, or the answer `until`, have ended.

    Raises: the first error of an answer, which cancels the others.
    """
    while engine.has_work and not (until is not None and until.has_ended):
        engine.step()
        error = next((answer.error for answer in answers if answer.error is not None), None)
        if error is not None:
            engine.end_all()
            raise error


class BatchAnswer:
    """Collects the tokens of one answer and finds stop strings.

    Args:
        before: last prompt tokens, in which a stop string may start.
    """

    def __init__(
        self,
        before: list[int],
        config: GenerationConfig,
        tokenizer: Any,
        streamer: Any,
        count: Callable[[], object],
    ):
        stop = config.stop_strings or []
        if stop and tokenizer is None:
            raise ValueError(f"{_NAME}: tokenizer must be there for stop_strings, got None")
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.has_ended = False
        self._tokenizer, self._streamer, self._count = tokenizer, streamer, count
        self._stops = [stop] if isinstance(stop, str) else [*stop]
        # A token has an octet at least, so that a stop string lies in so many tokens.
        self._longest = max((len(item.encode()) for item in self._stops), default=0)
        self._last = before[-self._longest - 1 :]

    def take(self, token: int) -> bool:
        self.tokens.append(token)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        return bool(self._stops) and self._has_ended(token)

    def _has_ended(self, token: int) -> bool:
        """True if this token completes a stop string."""
        tokens = [*self._last, token]
        before, after = self._tokenizer.decode(self._last), self._tokenizer.decode(tokens)
        self._last = tokens[-self._longest - 1 :]
        pairs = enumerate(zip(before, after, strict=False))
        known = next((place for place, (old, new) in pairs if old != new), len(before))
        return any((start := after.rfind(stop)) >= 0 and start + len(stop) > known for stop in self._stops)

    def end(self, reason: Reason | Exception) -> None:
        self.has_ended = True
        if isinstance(reason, Exception):
            self.error = reason
        elif self._streamer is not None:
            try:
                with as_errors():
                    self._streamer.end()
            except Exception as error:
                self.error = error
        self._count()


def _ids(prompt: Any, number: int, tokenizer: Any) -> Tensor:
    """Tokens [1, T] of a prompt, on the CPU."""
    ids = prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{_NAME}: tokenizer must be there for texts, got None for prompts[{number}]")
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    is_fitting = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not is_fitting or ids.numel() == 0 or ids.numel() != ids.shape[-1]:
        got = f"{ids.dtype} {[*ids.shape]}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        expected = "a text or tokens [T] of int64, one at least"
        raise ValueError(f"{_NAME}: prompts[{number}] must be {expected}, got {got}")
    return ids.reshape(1, -1).long().cpu()


def _each(name: str, value: Any, many: int, kind: type) -> list[Any]:
    """List of one value per prompt, from a single value of type `kind`, None, or a list of `many`."""
    if value is None or isinstance(value, kind):
        return [value] * many
    if not isinstance(value, (list, tuple)) or len(value) != many:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
        raise ValueError(f"{_NAME}: {name} must be a list of {many}, one for each prompt, got {got}")
    return [*value]
