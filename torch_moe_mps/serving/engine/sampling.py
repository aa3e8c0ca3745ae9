"""Sampling of the engine: the next token of each sequence; equal settings are sampled together.

The arithmetic is that of `generate`: `models/modules/sampling.py`.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from ..._faults import Mark, host_copy
from ...models.programs import Sampling, no_distribution
from .job import Job, as_errors


def in_order(processors: Any) -> Any:
    """Processors sorted so that those with `is_first` come first."""
    return type(processors)(sorted(processors, key=lambda item: not getattr(item, "is_first", False)))


class Sampler:
    """Samples the tokens of one job.

    Args:
        model: its generation config fills in the job's.

    Attributes:
        model: the argument.
        sampling: its logits processors.
        generator: random generator of the sampled tokens.
        repeats: True if the job has a seed.
        ends: end tokens.
        max_tokens: the maximum length of the answer.

    Raises: ValueError if the prompt is as long as `max_length`, which includes it.
    """

    def __init__(self, model: Any, job: Job):
        ids = job.inputs["input_ids"]
        config = _completed(model, job.config, ids)
        model._prepare_special_tokens(config, device=model.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids.to(model.device),
            logits_processor=LogitsProcessorList(job.processors),
            device=model.device,
            model_kwargs={},
        )
        self.sampling = Sampling(in_order(processors), config)
        device = model.device
        self.generator = torch.Generator(device).manual_seed(job.own_seed)
        self.repeats = job.seed is not None
        end = config.eos_token_id
        self.ends = {*end} if isinstance(end, (list, tuple)) else {end}
        self.max_tokens = config.max_length - ids.shape[1]
        self._until = None if config.max_time is None else time.monotonic() + config.max_time
        self._states: list[Tensor] | None = None  # the generator's, before draws that may be undone
        # Its prompt and its answer for processors, [1, T], on the device: a copy, which they may change.
        self.ids = ids.to(device, copy=True) if self.sampling.processors else None
        self.model = model

    @property
    def is_late(self) -> bool:
        """True once `max_time`, counted from the start of prefill, is over."""
        return self._until is not None and time.monotonic() > self._until

    def processed(self, logits: Tensor) -> Tensor | None:
        """Logits [1, V] after the processors that precede sampling; None without any.

        Raises: ValueError if a processor returns another shape or device.
        """
        if not self.sampling.processors:
            return None
        with as_errors():
            scores = self.sampling.processors(self.ids, logits.float())
        got, expected = _place_of(scores), _place_of(logits)
        if got != expected:
            raise ValueError(f"torch_moe_mps: processors of logits must return {expected}, got {got}")
        return scores.float()

    def draw(self, numbers: Tensor) -> None:
        """Fills a tensor with the exponential noise of the next sample."""
        if self._states is not None and self.repeats:
            self._states.append(self.generator.get_state())
        numbers.exponential_(generator=self.generator)

    def begin_draws(self) -> None:
        """Starts recording generator states, so that samples after a rejected draft token can be undone."""
        self._states = []

    def end_draws(self, count: int) -> None:
        """Rolls the generator back to its state after the first `count` samples."""
        states, self._states = self._states, None
        if states and count < len(states):
            self.generator.set_state(states[count])

    def append(self, token: Tensor) -> None:
        """Appends a sampled token [1] to the device-side history of the logits processors."""
        if self.ids is not None:
            self.ids = torch.cat((self.ids, token[None].to(self.ids.dtype)), 1)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of the sampling settings; rows with equal keys are sampled together."""
        if not self.sampling.do_sample:
            return (False,)
        return True, self.sampling.arguments(), self.sampling.end


def _completed(model: Any, config: GenerationConfig, ids: Tensor) -> GenerationConfig:
    """Resolves a GenerationConfig as `generate` does; `max_length` includes the prompt."""
    is_default = config.max_length is None and model.generation_config.max_length is None
    config, _ = model._prepare_generation_config(config)  # a copy
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=is_default or config.max_new_tokens is not None,  # else it warns of two
        has_default_min_length=True,
        model_input_name="input_ids",
        input_ids_length=ids.shape[1],
        inputs_tensor=ids,
    )
    model._validate_generated_length(config, ids.shape[1], is_default)
    return config


class Sampled:
    """Sampled tokens of a step, on the device, which the host reads later.

    Args:
        sampled: [2, B] int64: the tokens, and a nonzero flag where the logits had no distribution.
        errors: {row: exception of its logits processors}.
        model: named in errors.

    Attributes:
        rows: the remaining rows, in the order of their sequences.
    """

    def __init__(self, sampled: Tensor, errors: dict[int, Exception], model: Any):
        self._model, self._errors = model, errors
        self._tokens = sampled[0]
        self.rows = [*range(len(self._tokens))]
        self._mark = Mark(sampled.device)
        self._copy = host_copy(sampled)  # one, which torch commits with all that is encoded so far

    def inputs(self) -> Tensor:
        """Tokens [B, 1] of the remaining rows."""
        return _rows(self._tokens, self.rows)[:, None]

    def leave(self, row: int) -> None:
        """Removes a row; the last row takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def read(self) -> list[int | Exception]:
        """Token or error of each remaining row. Waits for the step that sampled them, not for later ones.

        Raises: torch.AcceleratorError if the GPU failed in that step.
        """
        self._mark.wait()
        tokens, wrong = self._copy.tolist()
        read: dict[int, int | Exception] = dict(enumerate(tokens))
        read |= {row: no_distribution(self._model) for row, is_wrong in enumerate(wrong) if is_wrong}
        read |= self._errors
        return [read[row] for row in self.rows]


def _place_of(value: Any) -> str:
    """Shape and device of a tensor, or the type name of another value, for messages."""
    return f"{[*value.shape]} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def _rows(tensor: Tensor, rows: list[int], dim: int = 0) -> Tensor:
    """Rows of a tensor in this order; the tensor itself if that changes nothing.

    Slices rather than indexes: an index tensor would make the host wait for its copy to MPS.
    """
    if rows == [*range(tensor.shape[dim])]:
        return tensor
    return torch.cat([tensor.narrow(dim, row, 1) for row in rows], dim)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> Sampled:
    """Samples the next token of each row from logits [B, V]."""
    rows, errors = _processed(samplers, logits)
    kinds: dict[Any, list[int]] = {}
    for row, sampler in enumerate(samplers):
        kinds.setdefault((rows[row] is None, sampler.kind), []).append(row)
    parts = []
    for (is_plain, _), of_kind in kinds.items():
        if is_plain:
            scores = _rows(logits, of_kind)
        else:
            scores = torch.cat([rows[row] for row in of_kind])  # type: ignore[misc]  # none is None
        try:
            parts.append(_of_kind([samplers[row] for row in of_kind], scores))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # their settings, which are the same, are wrong
            errors |= {row: error for row in of_kind if row not in errors}
            parts.append(torch.zeros((2, len(of_kind)), dtype=torch.int64, device=logits.device))
    sampled = parts[0]
    if len(parts) > 1:
        order = [row for of_kind in kinds.values() for row in of_kind]
        places = [order.index(row) for row in range(len(samplers))]
        sampled = _rows(torch.cat(parts, 1), places, 1)
    for row, sampler in enumerate(samplers):
        sampler.append(sampled[0, row : row + 1])
    return Sampled(sampled, errors, samplers[0].model)


def _processed(
    samplers: Sequence[Sampler], logits: Tensor
) -> tuple[list[Tensor | None], dict[int, Exception]]:
    """(logits [1, V] of each row after its processors, or None; {row: exception of its processors})."""
    rows, errors = list[Tensor | None](), dict[int, Exception]()
    for row, sampler in enumerate(samplers):
        try:
            rows.append(sampler.processed(logits[row : row + 1]))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            errors[row] = error
            rows.append(logits[row : row + 1].float())
    return rows, errors


def _of_kind(samplers: list[Sampler], scores: Tensor) -> Tensor:
    """[2, R] int64 of rows with equal settings: sampled tokens, and flags of rows without distribution."""
    sampling = samplers[0].sampling

    def fill(draws: Tensor) -> None:
        if any(sampler.repeats for sampler in samplers):
            for row, sampler in zip(draws, samplers, strict=True):
                sampler.draw(row)
        else:  # in one dispatch
            samplers[0].draw(draws)

    return sampling.sample(scores, fill)
