"""Several answers at once: prompts are read alone, in pieces between the steps of the answers that go on."""

import functools
import inspect
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..._faults import synchronize
from ..._text import first_line
from ...transformers.basics.wide_logits import wide_logits
from ...transformers.caches.batched import BatchedCache, NotBatchable, batch_capacity, capacity
from ...transformers.caches.cache import hands_cache_on
from ...transformers.caches.deferred_states import bytes_beside
from ...transformers.caches.prompt_cache import reads_whole
from ...transformers.caches.state import LayerState
from ...transformers.deferred_states import deferrable_layers
from ...transformers.trials.batching import reason_against_rows, reason_for_order
from ...transformers.upstream.calls import cache_argument
from ...transformers.upstream.generation import GenerationMixin, GenerationMode
from ..prefix_cache.disk import Restoring
from ..prefix_cache.memory import CachedPrefix, PrefixCache
from ..speculative.drafter import Row
from ..speculative.drafting import Drafting
from ..speculative.verify import verified
from .between import Between
from .generating import Generating, images_of, is_one_prompt, keeps_prompts
from .job import Job, Reason, prompt_length
from .memory import is_out_of_memory
from .one_by_one import generate_alone
from .prefill import AT_ONCE, PromptReader
from .ranges import check_job
from .sampling import Chooser, Chosen, choose
from .stand_in import turned, turning

logger = logging.getLogger(__name__)
_LEAST_PIECE = 64  # tokens of a prompt that are read between two steps
_STEPS = 4  # how many steps of the others a piece takes, about


@dataclass(eq=False)
class _Answer:
    """A job whose prompt is read, or whose tokens are generated.

    Attributes:
        reader: of the prompt; it has the cache.
        tokens: of the answer, as far as the host has read them.
        chosen: the token behind these, if it is generated alone and the host has not read it.
        row: for which tokens are drafted, if any are.
    """

    job: Job
    chooser: Chooser
    reader: PromptReader
    tokens: list[int] = field(default_factory=list)
    chosen: Chosen | None = None
    row: Row | None = None

    @property
    def prompt(self) -> Tensor:
        return self.job.inputs["input_ids"]

    @property
    def ids(self) -> Tensor:
        """The tokens [1, T] that are in the cache before the next step."""
        return torch.cat((self.prompt, self.prompt.new_tensor([self.tokens[:-1]])), 1)


class _Left(Exception):
    """The answer has ended whose prompt is being read."""


class Batch:
    """The answers that a model generates together, on the thread that calls `step`.

    A model whose cache has no rows that come and go generates as many answers, each in a call of its own.
    Beams, and models with a `generate` of their own, run by that, one at a time; the others go on between its
    tokens.

    A row is an island: what raises in the settings, the prompt, the draw, the functions or the end of one
    answer ends that answer, with the error as its reason. A fault of the GPU ends all that have begun, and
    so does what raises in a step of several. Where there is no memory for such a step, it ends the answer
    with the fewest tokens, and the others are read again.

    Args:
        prompts: keeps what was computed; None keeps nothing.
        most: answers at once.
        memory: bytes for the answers and the kept prompts, of which those unused longest are given up first;
            None is no limit. One answer is generated in any case.
        take: takes new jobs, between two tokens of one that `generate` generates. Returns: whether to go on.
        speculative: of tokens of the answers that are generated together; None for none.

    Attributes:
        waiting: jobs that have not begun.
        speculative: of tokens; None once none can be verified.
        answers: whose tokens are generated together, by row.
        alone: whose tokens are generated in calls of their own.
        read_tokens, cached_tokens: of prompts, that were computed, and that were kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: PrefixCache | None,
        most: int,
        memory: int | None = None,
        take: Callable[[], bool] = lambda: True,
        speculative: Drafting | None = None,
    ):
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
        self.speculative = speculative
        self._take_jobs, self._generated = take, list[Job]()  # by `generate`, which generates one at a time
        self._reasons = set[str]()  # said already: why answers are not generated together
        self._readings: list[_Answer] = []  # the first one, and a short one that overtakes it
        self._has_overtaken = False  # since the last piece of the first one
        self._has_passed = False  # whether a short one has begun before a long one that waits
        self._turn = 0  # in which the last job has begun
        self._again: deque[_Answer] = deque()  # to be read again, behind a step without memory
        self._restoring: tuple[Job, Restoring | None] | None = None  # from a disk, for the next job
        self._deferrable = {} if speculative is None else deferrable_layers(model)
        self._rows = BatchedCache(model, self._deferrable)
        self._chosen: Chosen | None = None  # by the last step, which the host has not read
        # Whether the next tokens are computed before the host reads these: mps would wait for it meanwhile.
        self._reads_late = model.device.type == "mps"
        self._bytes = self._beside = 0.0  # taken by a token of a row, at most, and by what drafts for it
        self._row_bytes = 0  # taken by a row, at most, so that drafts can be taken back from its states
        self._step_seconds, self._token_seconds = 0.0, 0.0
        self._stepped = 0.0  # when the last step ended
        self._turning = turning(model)
        self._needs_order: bool | None = None  # attention goes by where keys lie; None: not tried yet

    @property
    def active(self) -> int:
        return len(self._begun) + len(self._generated)

    @property
    def has_work(self) -> bool:
        return bool(self.active or self.waiting)

    @property
    def jobs(self) -> list[Job]:
        """All that have not ended."""
        return [*(answer.job for answer in self._begun), *self._generated, *self.waiting]

    @property
    def _begun(self) -> list[_Answer]:
        return [*self.answers, *self.alone, *self._again, *self._readings]

    @torch.no_grad()
    def step(self) -> None:
        """Reads at most a piece of one prompt, and generates a token of each answer.

        One that `generate` must generate is generated to its end, and the steps of the others come between.
        """
        try:
            self._advance()
        except torch.AcceleratorError as fault:
            self._end_all(fault)

    def _advance(self) -> None:
        """A step. Raises: torch.AcceleratorError."""
        with self._ending():
            self._end_cancelled()
            self._read()
            self._go_on()

    def _go_on(self) -> None:
        """Generates a token of each answer."""
        started = time.perf_counter()
        if self.answers:
            self._step()
        for answer in [*self.alone]:
            with self._island(answer.job):
                self._step_alone(answer)
        self._stepped = time.perf_counter()
        if self.answers or self.alone:
            self._step_seconds = self._stepped - started

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Block with a step, which ends answers by what it raises. Raises: torch.AcceleratorError."""
        try:
            yield
        except torch.AcceleratorError:
            raise
        except Exception as error:  # all that is computed may be wrong
            if is_out_of_memory(error):
                self._end_one(error)
            else:
                self._end_all(error)

    def end_all(self, reason: Reason | Exception = "cancelled") -> None:
        """Ends all answers, and what waits; what was computed is kept."""
        for answer in [*self.answers, *self.alone]:
            self._end(answer, reason)
        for answer in [*self._readings]:
            self._stop_reading(answer, reason)
        while self._again:
            self._again.popleft().job.end(reason)
        self._leave_restoring()
        while self.waiting:
            self.waiting.popleft().end(reason)

    def _end_all(self, error: Exception) -> None:
        """Ends all answers that have begun; their caches may be wrong."""
        begun = self._begun
        self.answers, self.alone, self._readings = [], [], []
        self._again.clear()
        self._rows, self._chosen = BatchedCache(self.model, self._deferrable), None
        for answer in begun:
            answer.job.end(error)

    def _end_one(self, error: Exception) -> None:
        """Ends an answer of a step for which there was no memory; the others are read again.

        Some of the layers may have computed the step: the caches of all are given up.
        """
        chosen, self._chosen = self._chosen, None
        answers, self.answers, self._rows = self.answers, [], BatchedCache(self.model, self._deferrable)
        self._gives_memory_back(error)
        tokens = [] if chosen is None else chosen.read()
        reasons = [self._give(answer, token) for answer, token in zip(answers, tokens, strict=False)]
        for answer, reason in zip([*answers], reasons, strict=False):
            if reason is not None:
                self._drafts_left(answer)
                answer.job.end(reason)
                answers.remove(answer)
        last = min(answers, key=lambda answer: len(answer.tokens), default=None)
        for answer in answers:
            if answer is last or answer.reader.images is not None:
                self._drafts_left(answer)
                answer.job.end(error)
            else:
                self._again.append(answer)

    def _gives_memory_back(self, error: Exception) -> None:
        """Gives up what the step held that an error has ended, and half of the kept prompts."""
        traceback.clear_frames(error.__traceback__)
        if self.prompts is not None:
            self.prompts.halve()

    def _end_cancelled(self) -> None:
        for answer in [item for item in (*self.answers, *self.alone) if item.job.is_cancelled]:
            self._end(answer, "cancelled")
        for answer in [item for item in self._readings if item.job.is_cancelled]:
            self._stop_reading(answer, "cancelled")
        for answer in [item for item in self._again if item.job.is_cancelled]:
            self._again.remove(answer)
            self._drafts_left(answer)
            answer.job.end("cancelled")
        for job in [job for job in self.waiting if job.is_cancelled]:
            self.waiting.remove(job)
            if self._restoring is not None and self._restoring[0] is job:
                self._leave_restoring()
            job.end("cancelled")

    # PrefixCache

    def _read(self) -> None:
        """Reads a piece of a prompt, and short ones that wait, in the time that one piece may take."""
        before = begun = time.perf_counter()
        has_begun = self._read_next()
        while has_begun and not (self._readings or self._again):
            now = time.perf_counter()
            if now - begun + now - before > _STEPS * self._step_seconds:
                break
            before, has_begun = now, self._read_next(is_short=True)

    def _read_next(self, is_short: bool = False) -> bool:
        """Reads a piece of a prompt. Returns: whether one has begun.

        Args:
            is_short: whether it must be one of the shortest, next in turn.
        """
        if not self._readings and self._again:
            self._readings.append(self._begun_again(self._again.popleft()))
        job, passes = self._next_job(is_short) or (None, False)
        if has_begun := job is not None and self._is_restored(job):
            self.waiting.remove(job)
            if not self._readings:
                self._has_passed = passes
            self._turn = max(self._turn, job.turn or 0)
            with self._island(job):
                reason = self._reason_for_generate(job)
                if reason is None:
                    self._readings.append(self._begin(job))
                else:
                    job.end(self._generate(job, reason))
        if not self._readings:
            return has_begun
        answer, logits = self._readings[-1], None
        self._has_overtaken = answer is not self._readings[0]
        with self._island(answer.job):
            logits = self._read_piece(answer)
        if logits is not None:
            self._settle()  # for all: it is no island's
            with self._island(answer.job):
                self._join(answer)
        if logits is not None and answer in self._readings:
            self._readings.remove(answer)
            if not answer.tokens:
                self._take(answer, *choose([answer.chooser], logits).read())
        return has_begun

    @contextmanager
    def _island(self, job: Job) -> Iterator[None]:
        """Block for one job that is not among the rows: what raises there ends that job, and no other."""
        try:
            yield
        except Exception as error:
            ended = [answer for answer in self._begun if answer.job is job]
            self._readings = [answer for answer in self._readings if answer not in ended]
            self.alone = [answer for answer in self.alone if answer not in ended]
            if isinstance(error, torch.AcceleratorError):
                job.end(error)
                raise
            if is_out_of_memory(error):
                self._gives_memory_back(error)
            for answer in ended:
                self._drafts_left(answer)
            job.end(error)

    def _next_job(self, is_short: bool = False) -> tuple[Job, bool] | None:
        """The next that may begin, if there is room for it, and whether a longer one waits: `generate`
        generates one at a time.

        While a prompt is read it is one that a single piece reads, between two pieces of the other. Such a
        one begins before a longer one that waits, too, once for each of these.

        Args:
            is_short: whether it must be one of the shortest, which passes no other.
        """
        if self.active >= self.most or len(self._readings) > 1 or (self._readings and self._has_overtaken):
            return None
        waiting, short, long = self._in_turn(), self._piece(), None
        if is_short:
            waiting = [job for job in waiting[:1] if prompt_length(job.inputs) <= _LEAST_PIECE]
        for job in waiting:
            length = prompt_length(job.inputs)
            if length <= short or (not self._readings and self._has_passed):
                return (job, long is not None) if self._has_slots(length) else None
            long = long or (job, length)
        if self._readings or long is None:
            return None
        job, length = long
        return (job, False) if self._has_slots(length) else None

    def _in_turn(self) -> list[Job]:
        """Jobs that may begin, in their order: each request has one answer a turn, the oldest first. Those
        that are asked for with something wrong end.
        """
        for job in [job for job in self.waiting if job.turn is None]:
            try:
                check_job(self.model, job)
                self._reason_for_generate(job)
            except Exception as error:
                self.waiting.remove(job)
                job.end(error)
            else:
                job.turn = self._turn + job.place
        jobs: list[Job] = [*self.waiting]
        if not self._later_may_begin:
            jobs = [job for job in jobs if job.place == 0]
        if self._generated:
            jobs = [job for job in jobs if self._reason_for_generate(job) is None]
        return sorted(jobs, key=lambda job: job.turn or 0)

    def _is_restored(self, job: Job) -> bool:
        """Whether memory has what a disk has of a job's prompt; a part of it is read where it has not."""
        if self._restoring is None or self._restoring[0] is not job:
            self._leave_restoring()
            is_kept = self.prompts is not None and not self.reads_whole
            begun = self.prompts.restoring(self.model, job.inputs) if self.prompts and is_kept else None
            self._restoring = job, begun
        restoring = self._restoring[1]
        if restoring is not None and self.prompts is not None:
            if not restoring.step(wait=not (self.answers or self.alone)):
                return False
            self.prompts.take_back(restoring)
            job.disk_tokens = len(restoring.ids)
        self._restoring = None
        return True

    def _leave_restoring(self) -> None:
        if self._restoring is not None and self._restoring[1] is not None:
            self._restoring[1].leave()
        self._restoring = None

    def _generate(self, job: Job, reason: str) -> Reason:
        """Generates a job by the model's `generate`, with a step of the others between its tokens."""
        self._say_alone(reason)

        def ends() -> bool:
            if goes_on := self._take_jobs():
                self._advance()  # a fault ends this one, too
            return job.is_cancelled or not goes_on

        def began(cached: int, read: int) -> None:
            self.cached_tokens += cached
            self.read_tokens += read

        self._generated.append(job)
        try:
            return generate_alone(self._answering, job, ends, began)
        finally:
            self._generated.remove(job)

    @functools.cached_property
    def reads_whole(self) -> bool:
        """Whether the model must read a prompt in one call: asked once, as all of its modules are for it."""
        return reads_whole(self.model)

    @functools.cached_property
    def _keeps_prompts(self) -> bool:
        return not self.reads_whole and keeps_prompts(self.model)

    @functools.cached_property
    def _only_by_generate(self) -> str | None:
        return reason_for_own_generate(self.model)

    def _reason_for_generate(self, job: Job) -> str | None:
        """Why `generate` has to generate a job, for a person; None where it does not."""
        return reason_of_settings(job.config) or self._only_by_generate

    @functools.cached_property
    def _between(self) -> Between:
        return Between(self.model)

    @functools.cached_property
    def _answering(self) -> Generating:
        return Generating(self.model, self.prompts)

    def _say_alone(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("torch_moe_mps: one by one, in turn with other answers: %s", reason)

    @property
    def _later_may_begin(self) -> bool:
        """Whether an answer behind the first one to its request may begin: rows beside a row make it slower.

        Of three rows or more, these leave one to other requests, and half of all while there are others.
        """
        if self.most <= 2:
            return True
        is_one = len({id(job.request) for job in self.jobs}) == 1
        later = sum(answer.job.place > 0 for answer in self._begun)
        return self.active < self.most - 1 and (is_one or later < self.most // 2)

    def _has_slots(self, length: int) -> bool:
        """Whether one more answer fits, of a prompt of so many tokens; gives up prompts for it."""
        lengths = [length, *(answer.prompt.shape[1] for answer in self._readings)]
        rows = len(self.answers) + len(lengths)
        return self.active == 0 or self._make_room(rows, max(lengths), sum(lengths))

    def _make_room(self, rows: int, longest: int, beside: int) -> bool:
        """Gives up kept prompts that lie where answers must: so many rows, the longest of so many tokens or
        more, and so many tokens beside them. Returns: whether there is enough for these.
        """
        if self.memory is None:
            return True
        longest = max(
            [longest, *(len(answer.reader.kept.ids) + len(answer.tokens) for answer in self.answers)]
        )
        tokens = capacity(rows, longest) + beside
        tokens += sum(len(item.reader.kept.ids) + len(item.tokens) for item in self.alone)
        for row in self._drafted_rows:
            self._note_held(row)
        needed = (self._bytes + self._beside) * tokens + self._row_bytes * batch_capacity(rows)
        if self.prompts is not None:
            room = int(self.memory - needed)
            self.prompts.shrink(room if self.speculative is None else self.speculative.shrink(room))
        return needed <= self.memory

    def _begin(self, job: Job) -> _Answer:
        inputs = job.inputs
        ids = inputs["input_ids"]
        is_kept = self._keeps_prompts and is_one_prompt(self.model, inputs)
        reader = PromptReader(
            self.model,
            ids,
            self.prompts if is_kept else None,
            images=job.images or images_of(self.model, inputs),
            beside={name: value for name, value in inputs.items() if name != "input_ids"},
            modules=self._turning,
            reads_whole=self.reads_whole,
        )
        cached = len(reader.kept.ids)
        job.cached_tokens, job.disk_tokens = cached, min(job.disk_tokens, cached)
        self.cached_tokens += cached
        self.read_tokens += ids.shape[1] - cached
        chooser = Chooser(self.model, job)
        job.tell(cached, ids.shape[1])
        row = None if self.speculative is None else Row(ids[0].tolist(), ids.shape[1], job.likely)
        return _Answer(job, chooser, reader, row=row)

    def _begun_again(self, answer: _Answer) -> _Answer:
        """An answer whose tokens so far are read as a prompt."""
        prompts, whole = answer.reader.prompts, self.reads_whole
        answer.reader = PromptReader(
            self.model, answer.ids, prompts, modules=self._turning, reads_whole=whole
        )
        if answer.row is not None:
            self._drafts_left(answer)
            answer.row = Row(answer.row.tokens, answer.row.prompt, answer.row.likely)
        return answer

    def _read_piece(self, answer: _Answer) -> Tensor | None:
        """Reads a piece of a prompt. Returns: the logits [1, V] behind its end."""
        reader, started = answer.reader, time.perf_counter()
        start = len(reader.kept.ids)
        others, has_images = functools.partial(self._go_on_beside, answer), reader.has_new_images
        try:
            with self._between.calling(others) if has_images else nullcontext():
                out = reader.read(self._called, self._piece())
        except _Left:
            return None
        is_read, tokens = reader.pieces == 0, len(reader.kept.ids)
        self._computed([answer], [start], out, [tokens - start])
        if self.answers or self.alone or is_read:
            synchronize(self.model.device)
            if not has_images:  # their encoder takes a time of its own
                self._token_seconds = (time.perf_counter() - started) / (tokens - start)
        if not answer.tokens:
            answer.job.tell(tokens, answer.prompt.shape[1])
        return out.logits[:, -1] if is_read else None

    def _go_on_beside(self, answer: _Answer) -> None:
        """Generates a token of the others while the images of a prompt are encoded, if it is time for one.

        Raises: _Left where the prompt's answer has ended meanwhile.
        """
        if not (self.answers or self.alone):
            return
        synchronize(self.model.device)
        if time.perf_counter() - self._stepped < _STEPS * self._step_seconds:
            return
        with self._ending(), turned(self._turning, {}):
            self._end_cancelled()
            self._go_on()
        if answer not in self._readings:
            raise _Left

    def _called(self, cache: Any, **inputs: Any) -> Any:
        if self.speculative is not None and (states := self.speculative.states):
            inputs["output_hidden_states"] = states[0] if len(states) == 1 else states  # these alone
        with wide_logits():  # the choosers widen them
            return self.model(**inputs, **cache_argument(self.model, cache))

    def _computed(
        self, answers: Sequence[_Answer], firsts: Sequence[int], out: Any, counts: Sequence[int]
    ) -> None:
        """Hands the states of so many tokens of each answer on to who drafts; the others are wrong."""
        if self.speculative is not None and self.speculative.states and out.hidden_states is not None:
            wanted = [out.hidden_states[number] for number in self.speculative.states]
            states = wanted[0] if len(wanted) == 1 else torch.cat(wanted, -1)
            rows = [answer.row for answer in answers if answer.row is not None]
            self.speculative.computed(rows, firsts, states, counts)

    @functools.cached_property
    def _against_rows(self) -> str | None:
        return reason_against_rows(self.model)

    def _piece(self) -> int:
        """How many tokens of a prompt are read at once: a few steps of the answers that wait meanwhile."""
        if not (self.answers or self.alone) or self._token_seconds == 0.0:
            return AT_ONCE if not (self.answers or self.alone) else AT_ONCE // 8
        tokens = int(_STEPS * self._step_seconds / self._token_seconds)
        return max(_LEAST_PIECE, min(AT_ONCE, tokens))

    def _stop_reading(self, answer: _Answer, reason: Reason | Exception) -> None:
        self._readings.remove(answer)
        self._keep(answer, answer.reader.kept)
        self._drafts_left(answer)
        answer.job.end(reason)

    def _join(self, answer: _Answer) -> None:
        """Lets an answer whose prompt is read go on beside the others.

        Its prompt is kept if it is copied to a row: an answer alone writes behind it, and is kept at its end.
        """
        kept = answer.reader.kept
        if kept.cache is not None:
            held = sum(LayerState(layer).memory() for layer in kept.cache.layers)
            self._bytes = max(self._bytes, held / len(kept.ids))
            if self.speculative is not None:
                kinds = [[k] if (k := self._deferrable.get(n)) else [] for n in range(len(kept.cache.layers))]
                beside = sum(map(bytes_beside, kept.cache.layers, kinds))
                self._row_bytes = max(self._row_bytes, beside)
        try:
            if self._against_rows is not None:
                raise NotBatchable(self._against_rows)
            self._rows.join(kept.cache, len(kept.ids), answer.reader.moved)
        except NotBatchable as error:
            self._say_alone(str(error))
            self.alone.append(answer)
            return
        self.answers.append(answer)
        self._begin_drafts(answer)
        self._keep(answer, kept)

    # Tokens

    def _step(self) -> None:
        if any(len(item.tokens) + 1 >= item.chooser.most for item in self.answers):
            self._settle()  # none has a token behind its last one
            if not self.answers:
                return
        speculative = self._drafted()
        if speculative is not None:
            self._verify(speculative)
        elif self.answers:
            self._step_plain()

    def _step_plain(self) -> None:
        """Computes the next token of each answer."""
        started, rows = time.perf_counter(), self._drafted_rows
        if self._rows.is_full():
            self._make_room(len(self.answers), 0, 0)
        before = self._chosen
        tokens = self._inputs(self.answers) if before is None else before.inputs()
        others = self._rows.arguments()  # may move the cache
        out = self._called(self._rows.cache, input_ids=tokens, **others)
        self._computed(self.answers, self._rows.lengths, out, [1] * len(self.answers))
        self._rows.advance()
        self._chosen = choose([answer.chooser for answer in self.answers], out.logits[:, -1])
        if before is not None:
            self._hand_out(before)
        if not self._reads_late:
            self._settle()
        took_its_time = before is not None or not self._reads_late
        if self.speculative is not None and took_its_time:
            self.speculative.width.took(rows, 1, time.perf_counter() - started, [1] * len(rows))

    # Drafts

    def _drafts_left(self, answer: _Answer) -> None:
        if answer.row is not None and self.speculative is not None:
            self._note_held(answer.row)
            self.speculative.left(answer.row)

    def _note_held(self, row: Row) -> None:
        if self.speculative is not None:
            self._beside = max(self._beside, self.speculative.held(row) / len(row.tokens))

    def _begin_drafts(self, answer: _Answer) -> None:
        if self.speculative is None:
            return
        if self.reads_whole:
            kind = type(self.model).__name__
            self.speculative.give_up(f"{kind} does not read several tokens behind a cache rightly")
            self.speculative = None
            return
        if answer.row is not None:
            self.speculative.width.begin(answer.row)
        if len(self.answers) == 2 and self._needs_order is None:
            reason = reason_for_order(self.model)
            self._needs_order = reason is not None
            if reason is not None:
                logger.warning(
                    "torch_moe_mps: all answers go on by as many draft tokens as hold in each: %s", reason
                )
        self.speculative.width.is_even = bool(self._needs_order) or self._rows.are_states

    def _drafted(self) -> list[list[int]] | None:
        """Drafts for each answer; None where the next step gives each a token without any, or none is left.

        The host has read all tokens where there are drafts. It does not wait for the last one as long as
        there are none.
        """
        speculative = self.speculative
        if speculative is None:
            return None
        if self._chosen is not None:
            rows, ahead, room = self._rows_to_draft(1)
            if not speculative.may_pay(rows, ahead, room):
                return None
            self._settle()
            if not self.answers:
                return None
        rows, ahead, room = self._rows_to_draft(0)
        found = speculative.draft(rows, ahead, room)
        return [[] for _ in rows] if found is None and any(ahead) else found

    @property
    def _drafted_rows(self) -> list[Row]:
        return [answer.row for answer in self.answers if answer.row is not None]

    def _rows_to_draft(self, unread: int) -> tuple[list[Row], list[int], list[int]]:
        """The rows, how many of their tokens are known that a step has behind its first, and how many drafts
        each may have, where the host has not read so many of their tokens.
        """
        rows = self._drafted_rows
        ahead = [len(row.tokens) + unread - n - 1 for row, n in zip(rows, self._rows.lengths, strict=True)]
        return rows, ahead, [max(0, a.chooser.most - len(a.tokens) - unread - 1) for a in self.answers]

    def _verify(self, speculative: list[list[int]]) -> None:
        """Computes some tokens of each answer together: those that are known, and drafts behind them.

        Each row moves on by the tokens that are right in it; where its states do not lag, by all or none;
        and where attention needs the order of keys, as all others do. What is right beyond stays known, and
        is computed again.
        """
        assert self.speculative is not None
        started, answers = time.perf_counter(), [*self.answers]
        rows, ahead, _ = self._rows_to_draft(0)
        known = [1 + count for count in ahead]
        filled = [count + len(own) for count, own in zip(known, speculative, strict=True)]
        tokens = min(filled) if self.speculative.width.is_even else max(filled)
        firsts, out = self._compute_several(rows, known, speculative, tokens)
        made = verified([answer.chooser for answer in answers], out.logits, known, speculative)
        counts = [max(0, len(own) - 1) for own in made]
        for answer, held, own in zip(answers, counts, speculative, strict=True):
            answer.job.accepted_tokens += held
            answer.job.rejected_tokens += len(own) - held
        before = [len(answer.tokens) for answer in answers]
        reasons = [self._give_all(answer, own) for answer, own in zip(answers, made, strict=True)]
        given = [len(answer.tokens) - count for answer, count in zip(answers, before, strict=True)]
        right = [count + max(0, new - 1) for count, new in zip(known, given, strict=True)]
        wrong = self._wrong([tokens - min(tokens, count) for count in right], tokens)
        if any(wrong):
            self._rows.take_back(wrong)
        self._computed(answers, firsts, out, [tokens - count for count in wrong])
        self.speculative.verified(rows, counts, speculative)
        seconds = (self.speculative.seconds if any(speculative) else 0.0) + time.perf_counter() - started
        self.speculative.width.took(rows, tokens, seconds, given)
        for answer, reason in zip(answers, reasons, strict=True):
            if reason is not None:
                self._end(answer, reason)

    def _wrong(self, wrong: list[int], tokens: int) -> list[int]:
        """How many tokens of each row are taken back of so many, for these that are wrong."""
        if self._rows.are_states:
            wrong = [tokens if count else 0 for count in wrong]
        return [max(wrong)] * len(wrong) if self._needs_order else wrong

    def _compute_several(
        self, rows: list[Row], known: list[int], speculative: list[list[int]], tokens: int
    ) -> tuple[list[int], Any]:
        """Computes so many tokens of each row. Returns: places of the first, and what the model gives."""
        inputs = [
            [*row.tokens[-count:], *own][:tokens]
            for row, count, own in zip(rows, known, speculative, strict=True)
        ]
        if self._rows.is_full(tokens):
            self._make_room(len(rows), 0, 0)
        ids = torch.tensor([own + own[-1:] * (tokens - len(own)) for own in inputs]).to(self.model.device)
        others = self._rows.arguments(tokens)  # may move the cache
        if self._rows.are_states and tokens > min(known):
            self._rows.hold()
        out = self._called(self._rows.cache, input_ids=ids, **others)
        firsts = self._rows.lengths
        self._rows.advance(tokens)
        return firsts, out

    def _give_all(self, answer: _Answer, tokens: Sequence[int | Exception]) -> Reason | Exception | None:
        """Gives tokens to their job until the answer is complete. Returns: why it ends, if it does."""
        reasons = (self._give(answer, token) for token in tokens)
        return next((reason for reason in reasons if reason is not None), None)

    def _inputs(self, answers: list[_Answer]) -> Tensor:
        """The last tokens [B, 1] of answers that the host has read."""
        return torch.tensor([[answer.tokens[-1]] for answer in answers]).to(self.model.device)

    def _settle(self) -> None:
        """Reads the tokens of the last step."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            self._hand_out(chosen)

    def _hand_out(self, chosen: Chosen) -> None:
        tokens = chosen.read()
        for answer, token in zip([*self.answers], tokens, strict=True):
            self._take(answer, token)

    def _step_alone(self, answer: _Answer) -> None:
        before, answer.chosen = answer.chosen, None
        if before is not None and len(answer.tokens) + 1 >= answer.chooser.most:
            self._take(answer, *before.read())
            return
        token = self._inputs([answer]) if before is None else before.inputs()
        with answer.reader.turning():
            out = self._called(answer.reader.kept.cache, input_ids=token, use_cache=True)
        answer.chosen = choose([answer.chooser], out.logits[:, -1])
        if before is not None:
            self._take(answer, *before.read())
        if not self._reads_late:
            chosen, answer.chosen = answer.chosen, None
            self._take(answer, *chosen.read())

    def _take(self, answer: _Answer, token: int | Exception) -> None:
        """Gives a token to its job, and ends the answer where it is complete."""
        if (reason := self._give(answer, token)) is not None:
            self._end(answer, reason)

    def _give(self, answer: _Answer, token: int | Exception) -> Reason | Exception | None:
        """Gives a token to its job. Returns: why the answer ends, if it does."""
        if isinstance(token, Exception):
            return token
        answer.tokens.append(token)
        if answer.row is not None:
            answer.row.tokens.append(token)
        try:
            is_complete = answer.job.take(token)
        except Exception as error:  # whoever takes the tokens may raise
            return error
        if is_complete or token in answer.chooser.ends:
            return "stop"
        is_late = len(answer.tokens) >= answer.chooser.most or answer.chooser.is_late
        return "length" if is_late else None

    def _end(self, answer: _Answer, reason: Reason | Exception) -> None:
        """Ends an answer. Its cache is kept, unless by an error, behind which more may be in it."""
        kept = answer.reader.kept
        is_kept = answer.reader.prompts is not None and not isinstance(reason, Exception)
        # The last token is in the cache only if a later step ran.
        computed, cache = answer.tokens[:-1], kept.cache
        if answer in self.alone:
            self.alone.remove(answer)
            computed = computed if answer.chosen is None else answer.tokens
        else:
            row = self.answers.index(answer)
            computed = answer.tokens[: self._rows.lengths[row] - answer.prompt.shape[1]]
            if is_kept and computed:
                with self._is_optional():
                    cache = None
                    cache = self._rows.alone(row)
            self._rows.leave(row)
            if self._chosen is not None:
                self._chosen.leave(row)
            self.answers[row] = self.answers[-1]
            self.answers.pop()
        self._drafts_left(answer)
        if is_kept:
            ids = torch.cat((answer.prompt[0], answer.prompt.new_tensor(computed)))
            self._keep(answer, replace(kept, ids=ids, cache=cache))
        answer.job.end(reason)

    def _keep(self, answer: _Answer, kept: CachedPrefix) -> None:
        prompts, is_whole = answer.reader.prompts, isinstance(kept.cache, DynamicCache) and len(kept.ids) > 0
        if prompts is not None and is_whole:
            with self._is_optional():
                prompts.put(kept)

    @contextmanager
    def _is_optional(self) -> Iterator[None]:
        """Block that keeps a prompt: where that fails, answers are as they are."""
        try:
            yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            line = first_line(error) or type(error).__name__
            logger.warning("torch_moe_mps: a prompt is not kept: %s", line)


def reason_of_settings(config: GenerationConfig) -> str | None:
    """Why `generate` has to generate an answer with these settings, for a person; None where it does not."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} is generate()'s"
    if config.cache_implementation not in (None, "dynamic") or config.use_cache is False:
        return "generation_config asks for another cache"
    return None


def reason_for_own_generate(model: PreTrainedModel) -> str | None:
    """Why `generate` has to generate all answers of a model, for a person; None where it does not."""
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{kind} is an encoder with a decoder"
    if not hands_cache_on(model):
        return f"{kind} has states that are in no cache"
    own, known = inspect.unwrap(model.generate), inspect.unwrap(GenerationMixin.generate)
    return None if own is known else f"{kind} has a generate() of its own"
