"""Several answers at once: prompts are read alone, in pieces between the steps of the answers that go on."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .._faults import raise_fault, synchronize
from ..transformers.basics.wide_logits import wide_logits
from ..transformers.caches.prompt_cache import new_cache, reads_whole
from ..transformers.caches.rows import NotJoinable, Rows, capacity
from ..transformers.caches.state import LayerState
from .choosing import Chooser, choose
from .generating import can_be_kept, images_of, prepare_steps
from .job import Job, Reason, prompt_length
from .prompts import AT_ONCE, Images, Kept, Prompts, is_marked, mark, pauses

logger = logging.getLogger(__name__)
_LEAST_PIECE = 64  # tokens of a prompt that are read between two steps
_STEPS = 8  # how many steps of the others a piece takes, about


@dataclass(eq=False)
class _Answer:
    """A job whose prompt is read, or whose tokens are generated.

    Attributes:
        kept: the tokens and the cache so far.
        ends: tokens of the prompt behind which its states may be kept; the last is its end.
        is_whole: whether the prompt is read in one piece, as that of images is.
        tokens: of the answer; the last one is not in the cache.
        moved: how far positions are from the number of tokens, where there are images.
    """

    job: Job
    chooser: Chooser
    kept: Kept
    is_kept: bool
    ends: list[int]
    is_whole: bool
    images: Images | None
    tokens: list[int] = field(default_factory=list)
    moved: int = 0

    @property
    def prompt(self) -> Tensor:
        return self.job.inputs["input_ids"]


class Batch:
    """The answers that a model generates together, on the thread that calls `step`.

    A model whose cache has no rows that come and go generates as many answers, each in a call of its own.

    Args:
        prompts: keeps what was computed; None keeps nothing.
        most: answers at once.
        memory: bytes for the answers and the kept prompts, of which those unused longest are given up first;
            None is no limit. One answer is generated in any case.

    Attributes:
        waiting: jobs that have not begun.
        answers: whose tokens are generated together, by row.
        alone: whose tokens are generated in calls of their own.
        read_tokens, cached_tokens: of prompts, that were computed, and that were kept.
    """

    def __init__(self, model: PreTrainedModel, prompts: Prompts | None, most: int, memory: int | None = None):
        if hasattr(model, "pipeline"):
            raise ValueError(
                "torch_moe_mps: several answers at once need a model in one process, got a pipeline: it "
                "generates one after the other"
            )
        self.model, self.prompts, self.most, self.memory = model, prompts, most, memory
        self.waiting: deque[Job] = deque()
        self.answers: list[_Answer] = []
        self.alone: list[_Answer] = []
        self.read_tokens = self.cached_tokens = 0
        self._reading: _Answer | None = None
        self._rows = Rows(model)
        self._bytes = 0.0  # that a token of a row takes, at most
        self._step_seconds, self._token_seconds = 0.0, 0.0
        self._reason: str | None = None  # why answers are generated alone
        self._turning = {name: m for name, m in model.named_modules() if hasattr(m, "rope_deltas")}
        prepare_steps(model)

    @property
    def active(self) -> int:
        return len(self.answers) + len(self.alone) + (self._reading is not None)

    @property
    def has_work(self) -> bool:
        return bool(self.active or self.waiting)

    @torch.no_grad()
    def step(self) -> None:
        """Reads at most a piece of one prompt, and generates a token of each answer."""
        self._end_cancelled()
        try:
            self._read()
            started = time.perf_counter()
            if self.answers:
                self._step()
            for answer in [*self.alone]:
                self._step_alone(answer)
            if self.answers or self.alone:
                self._step_seconds = time.perf_counter() - started
        except Exception as error:  # what is computed may be wrong for all
            self._end_all(error)

    def end_all(self, reason: Reason | Exception = "cancelled") -> None:
        """Ends all answers, and what waits; what was computed is kept."""
        for answer in [*self.answers, *self.alone]:
            self._end(answer, reason)
        if self._reading is not None:
            self._stop_reading(reason)
        while self.waiting:
            self.waiting.popleft().on_end(reason)

    def _end_all(self, error: Exception) -> None:
        """Ends all answers that have begun; their caches may be wrong."""
        begun = [*self.answers, *self.alone, *([] if self._reading is None else [self._reading])]
        self.answers, self.alone, self._reading, self._rows = [], [], None, Rows(self.model)
        for answer in begun:
            answer.job.on_end(error)

    def _end_cancelled(self) -> None:
        for answer in [each for each in (*self.answers, *self.alone) if each.job.is_cancelled]:
            self._end(answer, "cancelled")
        if self._reading is not None and self._reading.job.is_cancelled:
            self._stop_reading("cancelled")
        for job in [job for job in self.waiting if job.is_cancelled]:
            self.waiting.remove(job)
            job.on_end("cancelled")

    # Prompts

    def _read(self) -> None:
        if self._reading is None and self.waiting and self._has_room(prompt_length(self.waiting[0].inputs)):
            job = self.waiting.popleft()
            try:
                self._reading = self._begin(job)
            except Exception as error:  # of its settings or its inputs
                job.on_end(error)
        if self._reading is not None:
            self._read_piece(self._reading)

    def _has_room(self, length: int) -> bool:
        """Whether one more answer fits, of a prompt of so many tokens; gives up prompts for it."""
        if self.active >= self.most:
            return False
        if self.memory is None or self.active == 0:
            return True
        longest = max([length, *(len(each.kept.ids) + len(each.tokens) for each in self.answers)])
        tokens = capacity(len(self.answers) + 1, longest) + length
        tokens += sum(len(each.kept.ids) + len(each.tokens) for each in self.alone)
        needed = self._bytes * tokens
        kept = [] if self.prompts is None else self.prompts.kept
        held = [prompt.nbytes() for prompt in kept]
        while held and needed + sum(held) > self.memory:
            del kept[0], held[0]
        return needed <= self.memory

    def _begin(self, job: Job) -> _Answer:
        inputs = job.inputs
        config, ids = job.config, inputs["input_ids"]
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            raise ValueError(
                "torch_moe_mps: several answers at once take num_beams=1 and num_return_sequences=1, got "
                f"{config.num_beams} and {config.num_return_sequences}; model.generate() takes others"
            )
        images = images_of(self.model, inputs)
        is_kept = self.prompts is not None and not reads_whole(self.model) and can_be_kept(self.model, inputs)
        cache: Any = new_cache(self.model) if self.model._supports_default_dynamic_cache() else None
        kept = Kept(ids[0, :0], cache)
        if is_kept and self.prompts is not None:
            self.prompts.read(self.model)
            kept = self.prompts.take(ids[0], cache, images)
        job.cached_tokens = len(kept.ids)
        self.cached_tokens += len(kept.ids)
        self.read_tokens += ids.shape[1] - len(kept.ids)
        whole = cache is None or reads_whole(self.model) or (images is not None and kept.images is None)
        ends = [] if whole else pauses(kept, ids.shape[1])
        chooser = Chooser(self.model, job)
        job.on_progress(len(kept.ids), ids.shape[1])
        return _Answer(job, chooser, kept, is_kept, [*ends, ids.shape[1]], whole, images)

    def _read_piece(self, answer: _Answer) -> None:
        ids, kept = answer.prompt, answer.kept
        start, prompt = len(kept.ids), ids.shape[1]
        end = next(end for end in answer.ends if end > start)
        if not answer.is_whole:
            end = min(end, start + self._piece())
        started = time.perf_counter()
        inputs: dict[str, Any] = {"input_ids": ids[:, start:end].to(self.model.device)}
        if answer.images is not None and kept.images is None:
            inputs |= {
                n: value.to(self.model.device) for n, value in answer.job.inputs.items() if n not in inputs
            }
            kept.images = answer.images
        moved = {} if kept.images is None else kept.images.moved
        for name, module in self._turning.items():
            module.rope_deltas = moved.get(name)
        out = self._called(**inputs, past_key_values=kept.cache, use_cache=True, logits_to_keep=1)
        kept.cache, kept.ids = out.past_key_values, ids[0, :end]
        if kept.images is not None:
            kept.images.moved.update({name: module.rope_deltas for name, module in self._turning.items()})
        for module in self._turning.values():
            delta, module.rope_deltas = module.rope_deltas, None
            answer.moved = 0 if delta is None else int(delta.reshape(-1)[0])
        if end < prompt and is_marked(end, prompt) and answer.is_kept:
            mark(kept)
        if self.answers or self.alone or end == prompt:
            synchronize(self.model.device)
            self._token_seconds = (time.perf_counter() - started) / (end - start)
        answer.job.on_progress(end, prompt)
        if end == prompt:
            self._reading = None
            self._begin_tokens(answer, out.logits[:, -1])

    def _called(self, **inputs: Any) -> Any:
        with wide_logits():  # the choosers widen them
            return self.model(**inputs)

    def _piece(self) -> int:
        """How many tokens of a prompt are read at once: a few steps of the answers that wait meanwhile."""
        if not (self.answers or self.alone) or self._token_seconds == 0.0:
            return AT_ONCE if not (self.answers or self.alone) else AT_ONCE // 8
        tokens = int(_STEPS * self._step_seconds / self._token_seconds)
        return max(_LEAST_PIECE, min(AT_ONCE, tokens))

    def _stop_reading(self, reason: Reason | Exception) -> None:
        answer, self._reading = self._reading, None
        assert answer is not None
        self._keep(answer)
        answer.job.on_end(reason)

    def _begin_tokens(self, answer: _Answer, logits: Tensor) -> None:
        self._keep(answer)
        cache = answer.kept.cache
        try:
            self._rows.join(cache, answer.moved)
            self.answers.append(answer)
            held = sum(LayerState(layer).memory() for layer in cache.layers)
            self._bytes = max(self._bytes, held / len(answer.kept.ids))
        except NotJoinable as error:
            if self._reason != str(error):
                self._reason = str(error)
                logger.warning("torch_moe_mps: answers are generated one by one, in turn: %s", error)
            answer.kept = self._copied(answer)
            self.alone.append(answer)
        self._take(answer, *choose([answer.chooser], logits))

    def _copied(self, answer: _Answer) -> Kept:
        """Copy of a kept prompt, with which an answer that is generated alone goes on."""
        kept = answer.kept
        if self.prompts is None or kept not in self.prompts.kept:
            return kept
        self.prompts.kept.remove(kept)
        return kept

    # Tokens

    def _step(self) -> None:
        tokens = torch.tensor([[answer.tokens[-1]] for answer in self.answers]).to(self.model.device)
        out = self._called(input_ids=tokens, **self._rows.arguments())
        self._rows.advance()
        chosen = choose([answer.chooser for answer in self.answers], out.logits[:, -1])
        raise_fault()
        for answer, token in zip([*self.answers], chosen, strict=True):
            self._take(answer, token)

    def _step_alone(self, answer: _Answer) -> None:
        token = torch.tensor([[answer.tokens[-1]]]).to(self.model.device)
        moved = {} if answer.kept.images is None else answer.kept.images.moved
        for name, module in self._turning.items():
            module.rope_deltas = moved.get(name)
        out = self._called(input_ids=token, past_key_values=answer.kept.cache, use_cache=True)
        (chosen,) = choose([answer.chooser], out.logits[:, -1])
        raise_fault()
        self._take(answer, chosen)

    def _take(self, answer: _Answer, token: int | Exception) -> None:
        """Gives a token to its job, and ends the answer where it is complete."""
        if isinstance(token, Exception):
            self._end(answer, token)
            return
        answer.tokens.append(token)
        try:
            answer.chooser.take(token)
            is_complete = answer.job.on_token(token)
        except Exception as error:  # of whoever takes the tokens
            self._end(answer, error)
            return
        if is_complete or token in answer.chooser.ends:
            self._end(answer, "stop")
        elif len(answer.tokens) >= answer.chooser.most:
            self._end(answer, "length")

    def _end(self, answer: _Answer, reason: Reason | Exception) -> None:
        computed = answer.tokens[:-1]
        ids = torch.cat((answer.prompt[0], answer.prompt.new_tensor(computed)))
        if answer in self.alone:
            self.alone.remove(answer)
            cache = answer.kept.cache
        else:
            row = self.answers.index(answer)
            cache = self._rows.alone(row) if answer.is_kept and computed else answer.kept.cache
            self._rows.leave(row)
            self.answers[row] = self.answers[-1]
            self.answers.pop()
        if computed:
            answer.kept = Kept(ids, cache, answer.kept.states, answer.kept.images)
        self._keep(answer)
        answer.job.on_end(reason)

    def _keep(self, answer: _Answer) -> None:
        is_whole = isinstance(answer.kept.cache, DynamicCache) and len(answer.kept.ids) > 0
        if self.prompts is not None and answer.is_kept and is_whole:
            self.prompts.put(answer.kept)
