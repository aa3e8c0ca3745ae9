"""Sampling: the next token of each sequence; those with equal settings are sampled together."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from ..._faults import Mark, host_copy
from ...transformers.basics.logits import no_distribution
from ...transformers.modules.sampling import Sampling, likeliest
from .job import Job, as_errors

_LEAST_DRAW = torch.finfo(torch.float32).tiny


def in_order(processors: Any) -> Any:
    """A list of processors with those in front that are `is_first`."""
    return type(processors)(sorted(processors, key=lambda item: not getattr(item, "is_first", False)))


class Sampler:
    """Samples the tokens of one job.

    Args:
        model: whose generation config completes the job's.

    Attributes:
        model: the same.
        sampling: the processors of its logits.
        generator: of the sampled tokens.
        repeats: whether it draws the same numbers each time, as with a seed.
        ends: the tokens that end the answer.
        most: how many tokens the answer may have.

    Raises: ValueError for a prompt as long as `max_length`, which counts it.
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
        self.most = config.max_length - ids.shape[1]
        self._until = None if config.max_time is None else time.monotonic() + config.max_time
        self._states: list[Tensor] | None = None  # the generator's, before draws that may be undone
        # Its prompt and its answer for processors, [1, T], on the device: a copy, which they may change.
        self.ids = ids.to(device, copy=True) if self.sampling.others else None
        self.model = model

    @property
    def is_late(self) -> bool:
        """Whether `max_time` is over, from when the prompt began to be read."""
        return self._until is not None and time.monotonic() > self._until

    def processed(self, logits: Tensor) -> Tensor | None:
        """The logits [1, V] behind the processors that are not of the draw; None where there are none.

        Raises: ValueError where these are no logits.
        """
        if not self.sampling.others:
            return None
        with as_errors():
            scores = self.sampling.others(self.ids, logits.float())
        got, expected = _place_of(scores), _place_of(logits)
        if got != expected:
            raise ValueError(f"torch_moe_mps: processors of logits must return {expected}, got {got}")
        return scores.float()

    def draw(self, numbers: Tensor) -> None:
        """Writes the numbers of the next draw."""
        if self._states is not None and self.repeats:
            self._states.append(self.generator.get_state())
        numbers.exponential_(generator=self.generator)

    def begin_draws(self) -> None:
        """Draws of tokens begin, of which those behind a wrong draft will be undone."""
        self._states = []

    def end_draws(self, count: int) -> None:
        """Undoes all draws behind the first ones: they will be drawn again."""
        states, self._states = self._states, None
        if states and count < len(states):
            self.generator.set_state(states[count])

    def take(self, token: Tensor) -> None:
        """Notes a token [1] of the answer, on the device, for the processors."""
        if self.ids is not None:
            self.ids = torch.cat((self.ids, token[None].to(self.ids.dtype)), 1)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Rows of one kind are chosen together."""
        if not self.sampling.draws:
            return (False,)
        return True, self.sampling.arguments(), self.sampling.end


def _completed(model: Any, config: GenerationConfig, ids: Tensor) -> GenerationConfig:
    """Settings as `generate` completes them: `max_length` counts the prompt, whatever said how long it is."""
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
    """The sampled token of each row, on the device; the host may compute more before it reads them.

    Args:
        sampled: [2, B] int64: the tokens, and not 0 where the logits had no distribution.
        errors: {row: what its processors raised}.
        model: whose logits they were.

    Attributes:
        rows: which of the rows are left, in the order of their sequences.
    """

    def __init__(self, sampled: Tensor, errors: dict[int, Exception], model: Any):
        self._model, self._errors = model, errors
        self._tokens = sampled[0]
        self.rows = [*range(len(self._tokens))]
        self._mark = Mark(sampled.device)
        self._copy = host_copy(sampled)  # one, which torch commits with all that is encoded so far

    def inputs(self) -> Tensor:
        """The tokens [B, 1] of the rows that are left."""
        return _rows(self._tokens, self.rows)[:, None]

    def leave(self, row: int) -> None:
        """Gives a row up, whose number the last one takes."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def read(self) -> list[int | Exception]:
        """The token of each row that is left, or the error in its place.

        Waits for the step that chose them, and for no later one.

        Raises: torch.AcceleratorError if the GPU has failed at it.
        """
        self._mark.wait()
        tokens, wrong = self._copy.tolist()
        read: dict[int, int | Exception] = dict(enumerate(tokens))
        read |= {row: no_distribution(self._model) for row, is_wrong in enumerate(wrong) if is_wrong}
        read |= self._errors
        return [read[row] for row in self.rows]


def _place_of(value: Any) -> str:
    """Shape and device of a tensor; the type of anything else."""
    return f"{[*value.shape]} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def _rows(tensor: Tensor, rows: list[int], dim: int = 0) -> Tensor:
    """Rows of a tensor, in this order; all of them are the tensor itself.

    They are sliced: the host would wait for mps to copy their numbers to it.
    """
    if rows == [*range(tensor.shape[dim])]:
        return tensor
    return torch.cat([tensor.narrow(dim, row, 1) for row in rows], dim)


def sample(samplers: Sequence[Sampler], logits: Tensor) -> Sampled:
    """The next token of each row, from logits [B, V] of the model."""
    rows, errors = _processed(samplers, logits)
    kinds: dict[Any, list[int]] = {}
    for row, sampler in enumerate(samplers):
        kinds.setdefault((rows[row] is None, sampler.kind), []).append(row)
    made = []
    for (is_plain, _), of_kind in kinds.items():
        if is_plain:
            scores = _rows(logits, of_kind)
        else:
            scores = torch.cat([rows[row] for row in of_kind])  # type: ignore[misc]  # none is None
        try:
            made.append(_of_kind([samplers[row] for row in of_kind], scores))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # their settings, which are the same, are wrong
            errors |= {row: error for row in of_kind if row not in errors}
            made.append(torch.zeros((2, len(of_kind)), dtype=torch.int64, device=logits.device))
    sampled = made[0]
    if len(made) > 1:
        order = [row for of_kind in kinds.values() for row in of_kind]
        places = [order.index(row) for row in range(len(samplers))]
        sampled = _rows(torch.cat(made, 1), places, 1)
    for row, sampler in enumerate(samplers):
        sampler.take(sampled[0, row : row + 1])
    return Sampled(sampled, errors, samplers[0].model)


def _processed(
    samplers: Sequence[Sampler], logits: Tensor
) -> tuple[list[Tensor | None], dict[int, Exception]]:
    """The logits [1, V] of each row behind its own processors, None without any; {row: what they raised}."""
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
    """The tokens of rows with equal settings, and whether each had no distribution: [2, R] int64."""
    sampling = samplers[0].sampling
    if not sampling.draws:
        return likeliest(sampling.known(None, scores.float()) if sampling.known else scores)

    def fill(draws: Tensor) -> None:
        if any(sampler.repeats for sampler in samplers):
            for row, sampler in zip(draws, samplers, strict=True):
                sampler.draw(row)
        else:  # in one dispatch
            samplers[0].draw(draws)

    sampled = sampling.draw(scores, fill)
    if sampled is not None:
        return sampled
    shares = sampling.known(None, scores.float()).softmax(-1)
    draws = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    fill(draws)
    races = shares / draws.clamp_(min=_LEAST_DRAW)  # else a share of 0 and a draw of -0 are NaN, the largest
    return torch.stack((races.argmax(-1), shares.isnan().any(-1).long()))
