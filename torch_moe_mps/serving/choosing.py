"""The next token of each row of a batch: rows with equal settings are drawn together."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..ops._checks import ACTIVATION_DTYPES
from ..ops.sampling import MAX_VOCABULARY, sample_
from ..transformers.basics.self_check_state import refused
from ..transformers.modules.sampling import OPERATOR, Sampling
from .job import Job

_NO_DISTRIBUTION = (
    "moe_mps::sample_: logits must be finite or -inf, and not all -inf, to draw a token, "
    "got NaN, +inf or -inf alone: the answer ends there"
)


class Chooser:
    """How the tokens of one job are chosen.

    Args:
        model: whose generation config completes the job's.

    Attributes:
        sampling: the processors of its logits.
        generator: of the drawn tokens; None where the job has no seed.
        ends: the tokens that end the answer.
        most: how many tokens the answer may have.
    """

    def __init__(self, model: Any, job: Job):
        ids = job.inputs["input_ids"]
        config, _ = model._prepare_generation_config(copy.deepcopy(job.config))
        model._prepare_special_tokens(config, device=model.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=ids.shape[1],
            encoder_input_ids=ids.to(model.device),
            logits_processor=LogitsProcessorList(job.processors),
            device=model.device,
            model_kwargs={},
        )
        self.sampling = Sampling(processors, config)
        device = model.device
        self.generator = None if job.seed is None else torch.Generator(device).manual_seed(job.seed)
        end = config.eos_token_id
        self.ends = {*end} if isinstance(end, (list, tuple)) else {end}
        length = config.max_new_tokens
        self.most = int(config.max_length - ids.shape[1] if length is None else length)
        # Of a job with processors of its own: its prompt and its answer, [1, T], on the device.
        self.ids = ids.to(device) if self.sampling.others else None

    def processed(self, logits: Tensor) -> Tensor:
        """The logits [1, V] behind the processors that are not of the draw."""
        return self.sampling.others(self.ids, logits.float())

    def take(self, token: int) -> None:
        """Notes a token of the answer, for the processors."""
        if self.ids is not None:
            self.ids = torch.cat((self.ids, self.ids.new_tensor([[token]])), 1)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Rows of one kind are chosen together."""
        if not self.sampling.draws:
            return (False,)
        return True, self.sampling.arguments(), self.sampling.end


def choose(choosers: Sequence[Chooser], logits: Tensor) -> list[int | Exception]:
    """The next token of each row, or what it has in its place, from logits [B, V] of the model."""
    chosen: list[Any] = [None] * len(choosers)
    kinds: dict[Any, list[int]] = {}
    rows = {}
    for row, chooser in enumerate(choosers):
        try:
            rows[row] = chooser.processed(logits[row : row + 1]) if chooser.sampling.others else None
        except Exception as error:  # of a processor: it is this row's
            chosen[row] = error
            continue
        kinds.setdefault((rows[row] is None, chooser.kind), []).append(row)
    made = []
    for (is_plain, _), of_kind in kinds.items():
        if not is_plain:
            scores = torch.cat([rows[row] for row in of_kind])  # type: ignore[misc]  # they have processors
        elif len(of_kind) == len(choosers):
            scores = logits
        else:
            scores = logits[of_kind]
        made.append((of_kind, *_of_kind([choosers[row] for row in of_kind], scores)))
    for of_kind, tokens, invalid in made:  # only now does the host wait
        wrong = [0] * len(of_kind) if invalid is None else invalid.tolist()
        for row, token, is_wrong in zip(of_kind, tokens.tolist(), wrong, strict=True):
            chosen[row] = RuntimeError(_NO_DISTRIBUTION) if is_wrong else token
    return chosen


def _of_kind(choosers: list[Chooser], scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tokens [R] of rows with equal settings, and whether each had no distribution."""
    sampling = choosers[0].sampling
    if not sampling.draws:
        scores = sampling.known(None, scores.float()) if sampling.known else scores
        return scores.argmax(-1), None
    draws = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    if all(chooser.generator is None for chooser in choosers):
        draws.exponential_()
    else:
        for row, chooser in zip(draws, choosers, strict=True):
            row.exponential_(generator=chooser.generator)
    invalid = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
    arguments = None if OPERATOR in refused() else sampling.arguments()
    takes = scores.shape[1] <= MAX_VOCABULARY and scores.dtype in ACTIVATION_DTYPES
    if arguments is not None and takes:
        return sample_(scores, draws, invalid, **dict(arguments), otherwise=sampling.end), invalid
    shares = sampling.known(None, scores.float()).softmax(-1)
    return (shares / draws).argmax(-1), shares.isnan().any(-1).int()
