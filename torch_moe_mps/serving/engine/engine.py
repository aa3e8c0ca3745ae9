"""The engine: continuous batching of sequences, with chunked prefill between their steps."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..._faults import Mark, lost_gpu, synchronize
from ...models.programs import BatchedCache, NotBatchable
from ..prefix_cache.memory import CachedPrefix, PrefixCache
from .abilities import Abilities, check_model
from .decoding import Decoding
from .drafting import Drafting
from .drafts import Drafts
from .executor import executor_of
from .groups import Single
from .job import Counts, Job
from .pool import Pool
from .ranges import check_job
from .sampling import Sampled, Sampler, sample
from .scheduler import STEPS, Budget, Plan, Scheduler, StepTimes
from .sequence import Sequence

logger = logging.getLogger(__name__)


class _Cancelled(Exception):
    """Raised within a model call to abort the prefill of a cancelled sequence."""


class _Chunk(NamedTuple):
    """A prefill chunk in flight on the device.

    Attributes:
        started: host time of its dispatch.
        first: first sampled token, if the chunk completes the prompt.
    """

    started: float
    tokens: int
    has_images: bool
    first: Sampled | None


class Engine:
    """Runs jobs with continuous batching, on the thread that calls `step`.

    Sequences are batched if the model's cache allows it; otherwise each decodes in a separate call.
    `isolation` defines which sequences an error ends.

    Args:
        prefix_cache: None disables prefix caching.
        max_sequences: maximum number of concurrent sequences.
        memory: bytes for sequences and cached prefixes; the least recently used prefixes are evicted first.
            None is no limit. One sequence always runs.
        drafting: speculative decoding of batched sequences; None disables it.

    Raises: ValueError for a model that only its `generate` runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prefix_cache: PrefixCache | None,
        max_sequences: int,
        memory: int | None = None,
        drafting: Drafting | None = None,
    ):
        check_model(model)
        self.model, self.prefix_cache, self.counts = model, prefix_cache, Counts()
        self.budget = Budget(max_sequences, memory, BatchedCache.capacity, BatchedCache.rows_of_buffer)
        self.abilities, self.drafts = Abilities(model), Drafts(model, drafting, self.budget)
        self.times = StepTimes(largest=self.abilities.largest_chunk)
        self.executor = executor_of(model, self.abilities, lambda: self.drafts.states)
        self.budget.memory = self.executor.room(memory)
        self.pool = Pool(self.executor, prefix_cache, self.drafts)
        others = self.drafts, prefix_cache, self.budget, self.times
        self.decoding = Decoding(self.pool, self.executor, *others)
        self._scheduler = Scheduler()
        self._encoded: Mark | None = None  # a module in front of the decoder, of the prompt that is computed

    @property
    def has_work(self) -> bool:
        return bool(self.pool.sequences)

    @property
    def active(self) -> int:
        """Number of admitted sequences."""
        return sum(each.has_begun for each in self.pool.sequences)

    @property
    def waiting(self) -> list[Sequence]:
        """Queued sequences."""
        return [each for each in self.pool.sequences if not each.has_begun]

    def submit(self, *jobs: Job) -> None:
        """Queues jobs. An invalid job is rejected through its callback."""
        for job in jobs:
            sequence = Sequence(job, turn=self._scheduler.turn_of(job.place))
            self.pool.sequences.append(sequence)
            with self.pool.isolation.one(sequence):
                check_job(self.model, job)

    @torch.no_grad()
    def step(self) -> None:
        """Runs one engine step: at most one prefill chunk, then one token for each decoding sequence."""
        self.run(self._step)

    def run(self, work: Callable[[], None]) -> None:
        """Runs a callable between steps. A GPU fault ends all admitted sequences.

        Raises: torch.AcceleratorError if this process can use the GPU no more.
        """
        try:
            work()
        except torch.AcceleratorError as fault:
            self.pool.fail_all(fault)
            if (lost := lost_gpu()) is not None:
                raise lost from fault

    def _step(self) -> None:
        """Runs one step without handling GPU faults. Raises: torch.AcceleratorError."""
        with self.pool.isolation.step():
            self.pool.end_cancelled()
            if any(each.phase != "decoding" for each in self.pool.sequences):
                self._prefill()
            self.decoding.step()

    def end_all(self) -> None:
        """Cancels all sequences and caches their computed prefixes."""
        for sequence in [*self.pool.sequences]:
            self.pool.end(sequence, "cancelled")

    # Prefill

    def _prefill(self) -> None:
        """Computes one prefill chunk, then queued short prompts while the chunk's time budget lasts."""
        before = begun = time.perf_counter()
        has_begun = self._prefill_next()
        while has_begun and not self._is_prefilling:
            now = time.perf_counter()
            if now - begun + now - before > STEPS * self.times.step:
                break
            before, has_begun = now, self._prefill_next(is_short=True)

    @property
    def _is_prefilling(self) -> bool:
        """True while an admitted sequence still has prompt tokens to compute."""
        return any(each.phase in ("waiting", "prefill") and each.has_begun for each in self.pool.sequences)

    def _prefill_next(self, is_short: bool = False) -> bool:
        """Computes the next prefill chunk. Returns: True if a sequence was admitted.

        Args:
            is_short: admits only the next sequence, if its prompt is short.
        """
        self.drafts.measure(self.pool.batch.sequences)
        plan = self._scheduler.plan(self.pool.sequences, self.budget, self.times, is_short)
        if plan.evict is not None:
            self.decoding.evict(plan.evict)
        has_begun = plan.admit is not None and self._admit(plan)
        sequence: Sequence | None = plan.prefill
        if has_begun and plan.admit.phase == "prefill":
            sequence = plan.admit
        if sequence is None or sequence.phase != "prefill":
            return has_begun
        self._scheduler.prefilled(sequence, self.pool.sequences, plan.chunk)
        chunk = None
        with self.pool.isolation.one(sequence):
            chunk = self._compute_chunk(sequence, plan.chunk)
        if chunk is not None:
            self.decoding.settle(self.pool.batch)  # for all: rows change where one joins
            with self.pool.isolation.one(sequence):
                self._end_chunk(sequence, chunk)
        return has_begun

    def _admit(self, plan: Plan) -> bool:
        """Admits a sequence. Returns: False while its prefix is still being read from the disk."""
        sequence: Sequence = plan.admit
        is_restored = True
        with self.pool.isolation.optional():  # prefixes that cannot be read are computed
            is_restored = self._is_restored(sequence)
        if not is_restored:
            return False
        sequence.restoring = None
        self._scheduler.admitted(plan)
        with self.pool.isolation.one(sequence):
            if sequence.phase != "ended":
                self._begin(sequence)
        return True

    def _is_restored(self, sequence: Sequence) -> bool:
        """True once the prompt's prefix is in memory; otherwise reads the next part of it from the disk."""
        cache = self.prefix_cache
        if cache is None or sequence.has_begun or self.abilities.reads_whole:
            return True
        if sequence.restoring is None:
            for other in self.pool.of_phase("restoring"):  # it was the next before
                if other.restoring is not None:
                    other.restoring.leave()
                other.restoring, other.phase = None, "waiting"
            sequence.restoring = cache.restoring(self.model, sequence.job.inputs)
        restoring = sequence.restoring
        if restoring is not None:
            sequence.phase = "restoring"
            if not restoring.step(wait=not self.pool.is_decoding):
                return False
            cache.take_back(restoring)
            sequence.job.usage.disk_tokens = len(restoring.ids)
        return True

    def _begin(self, sequence: Sequence) -> None:
        """Starts or restarts the prefill of a sequence."""
        if sequence.prefill is not None:
            sequence.prefill = self.executor.prefill_again(sequence)
            self.drafts.left(sequence)
            sequence.row = self.drafts.row_of(sequence)
            return self.pool.enter(sequence, "prefill")
        job, usage, whole = sequence.job, sequence.job.usage, sequence.prompt_tokens
        prefill = self.executor.prefill_of_job(job, self.prefix_cache)
        cached = len(prefill.cached.ids)
        usage.cached_tokens, usage.disk_tokens = cached, min(usage.disk_tokens, cached)
        self.counts.cached += cached
        self.counts.computed += whole - cached
        sequence.sampler = Sampler(self.model, job)
        job.report_progress(cached, whole)
        sequence.prefill, sequence.row = prefill, self.drafts.row_of(sequence)
        self.pool.enter(sequence, "prefill")

    def _compute_chunk(self, sequence: Sequence, chunk: int) -> _Chunk | None:
        """Dispatches a prefill chunk and, after the last one, the sampling of the first token.

        Does not wait for the device. Returns: None if the sequence ended meanwhile.
        """
        prefill, started = sequence.prefill, time.perf_counter()
        assert prefill is not None and sequence.sampler is not None
        start, has_images, self._encoded = len(prefill.cached.ids), prefill.has_new_images, None
        try:
            out = self.executor.prefill(prefill, chunk, lambda: self._decode_beside(sequence))
        except _Cancelled:
            return None
        tokens, first = len(prefill.cached.ids) - start, None
        self.drafts.computed([sequence], [start], out, [tokens])
        if prefill.chunks == 0 and not sequence.tokens:
            first = sample([sequence.sampler], out.logits[:, -1])
        return _Chunk(started, tokens, has_images, first)

    def _end_chunk(self, sequence: Sequence, chunk: _Chunk) -> None:
        """Finishes a dispatched chunk: waits for it if others decode, and moves a prefilled sequence to
        decoding.

        The prompt is cached now if it was copied into the batch; an unbatched sequence is cached at its end,
        because it extends its prompt's cache in place.
        """
        prefill = sequence.prefill
        assert prefill is not None
        is_whole = prefill.chunks == 0
        if is_whole:
            self._join(sequence)
        if is_whole or self.pool.is_decoding:
            synchronize(self.executor.device)
            if not chunk.has_images:  # their encoder takes a time of its own
                self.times.token = (time.perf_counter() - chunk.started) / chunk.tokens
        if not sequence.tokens:
            sequence.job.report_progress(len(prefill.cached.ids), sequence.prompt_tokens)
        if is_whole and sequence.is_batched:
            self.pool.cache(sequence, prefill.cached)
        if chunk.first is not None:
            self.pool.append(sequence, *chunk.first.read())

    def _decode_beside(self, sequence: Sequence) -> None:
        """Steps the decoding sequences while a prompt's images are encoded, if a step is due.

        Raises: _Cancelled if the sequence ended meanwhile.
        """
        if not self.pool.is_decoding:
            return
        before, self._encoded = self._encoded, Mark(self.executor.device, commits=True)
        if before is not None:  # one module is in the GPU's queue while the host encodes the next
            before.wait()
        if time.perf_counter() - self.times.ended < STEPS * self.times.step:
            return
        with self.pool.isolation.step():
            self.pool.end_cancelled()
            self.decoding.step()
        if sequence.phase == "ended":
            raise _Cancelled

    def _join(self, sequence: Sequence) -> None:
        """Moves a prefilled sequence to decoding, in the batch if it is batchable."""
        prefill = sequence.prefill
        assert prefill is not None
        self._measure(prefill.cached)
        self.pool.enter(sequence, "decoding")
        try:
            if self.abilities.not_batchable is not None:
                raise NotBatchable(self.abilities.not_batchable)
            self.pool.batch.join(sequence)
        except NotBatchable as error:
            self.abilities.say_alone(str(error))
            self.pool.groups.append(Single(sequence))
            return
        self.drafts.start(self.pool.batch, sequence, self.abilities.reads_whole)

    def _measure(self, cached: CachedPrefix) -> None:
        """Records the bytes of a sequence for the budget."""
        if cached.cache is None:
            return
        token, beside = cached.rates(len(cached.ids))
        self.budget.token = max(self.budget.token, token)
        if self.drafts.drafting is not None:
            beside += cached.memory_of_drafts(self.drafts.deferrable)
        self.budget.state = max(self.budget.state, beside)
