"""Unfinished sequences, their decoding groups, and their ends."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import DynamicCache

from ..prefix_cache.memory import CachedPrefix, PrefixCache
from .drafts import Drafts
from .executor import Executor
from .groups import BatchedGroup, Group
from .isolation import Isolation
from .job import Reason
from .sequence import Phase, Sequence


class Pool:
    """Unfinished sequences and their decoding groups.

    Attributes:
        sequences: in the order of entering their phases.
        groups: of decoding sequences; the first is the batch.
        isolation: contexts that end sequences after errors.
    """

    def __init__(self, executor: Executor, prefix_cache: PrefixCache | None, drafts: Drafts):
        self._executor, self._prefix_cache, self._drafts = executor, prefix_cache, drafts
        self.sequences: list[Sequence] = []
        self.groups: list[Group] = [self._new_batch()]
        self.isolation = Isolation(self)

    def _new_batch(self) -> BatchedGroup:
        return BatchedGroup(self._executor.rows(self._drafts))

    @property
    def batch(self) -> BatchedGroup:
        """Group of the batched sequences."""
        batch = self.groups[0]
        assert isinstance(batch, BatchedGroup)
        return batch

    def of_phase(self, phase: Phase) -> list[Sequence]:
        return [each for each in self.sequences if each.phase == phase]

    @property
    def is_decoding(self) -> bool:
        """True if any sequence waits for the next step."""
        return any(group.sequences for group in self.groups)

    def enter(self, sequence: Sequence, phase: Phase) -> None:
        """Moves a sequence to a phase, after the others in it."""
        sequence.phase = phase
        self.sequences = [*self._without(sequence), sequence]  # at once: other threads count them

    def _without(self, sequence: Sequence) -> list[Sequence]:
        return [each for each in self.sequences if each is not sequence]

    # Tokens

    def append_all(self, sequence: Sequence, tokens: Iterable[int | Exception]) -> Reason | Exception | None:
        """Appends tokens to a sequence until it is complete. Returns: the reason for its end, or None."""
        sampler = sequence.sampler
        assert sampler is not None
        for token in tokens:
            if isinstance(token, Exception):
                return token
            sequence.append(token)
            try:
                is_complete = sequence.job.append(token)
            except Exception as error:  # whoever takes the tokens may raise
                return error
            if is_complete or token in sampler.ends:
                return "stop"
            if len(sequence.tokens) >= sampler.max_tokens or sampler.is_late:
                return "length"
        return None

    def append(self, sequence: Sequence, token: int | Exception) -> None:
        """Appends a token to a sequence, and ends it if that completes it."""
        if (reason := self.append_all(sequence, [token])) is not None:
            self.end(sequence, reason)

    # Ends

    def end(self, sequence: Sequence, reason: Reason | Exception) -> None:
        """Ends a sequence and caches its computed prefix, except after an error."""
        if sequence.phase != "ended":
            self._leave(sequence, None if isinstance(reason, Exception) else self._prefix_of(sequence))
            sequence.job.end(reason)

    def fail_all(self, error: Exception) -> None:
        """Ends all admitted sequences; the engine's caches may be wrong."""
        failed = [each for each in self.sequences if each.has_begun]
        self.groups = [self._new_batch()]
        self.sequences = [each for each in self.sequences if each not in failed]
        for sequence in failed:
            sequence.phase = "ended"
            sequence.job.end(error)

    def end_cancelled(self) -> None:
        for sequence in [each for each in self.sequences if each.job.is_cancelled]:
            self.end(sequence, "cancelled")

    def preempt(self, error: Exception) -> None:
        """Ends the batched sequence with the fewest tokens, and queues the others for recomputation.

        Some layers may already have computed the step, so the cache is dropped.
        """
        batch = self.batch
        left, sampled = [*batch.sequences], batch.sampled
        self.groups[0] = self._new_batch()
        tokens = [] if sampled is None else sampled.read()
        for sequence, token in zip(batch.sequences, tokens, strict=False):
            if (reason := self.append_all(sequence, [token])) is not None:
                self._leave(sequence)
                sequence.job.end(reason)
                left.remove(sequence)
        last = min(left, key=lambda each: len(each.tokens), default=None)
        for sequence in left:
            sequence.is_batched = False
            if sequence is last or (sequence.prefill is not None and sequence.prefill.images is not None):
                self.end(sequence, error)
            else:
                self.enter(sequence, "waiting")

    def free(self) -> None:
        """Evicts half of the cached prefixes after a failed allocation."""
        if self._prefix_cache is not None:
            self._prefix_cache.halve()

    def _leave(self, sequence: Sequence, prefix: CachedPrefix | None = None) -> None:
        """Removes a sequence and caches its prefix, if any."""
        if sequence.restoring is not None:
            sequence.restoring.leave()
        for group in [each for each in self.groups if sequence in each.sequences]:
            group.leave(sequence)
        self.groups[1:] = [each for each in self.groups[1:] if each.sequences]
        self.sequences, sequence.phase = self._without(sequence), "ended"
        self._drafts.left(sequence)
        if prefix is not None:
            self.cache(sequence, prefix)

    def _prefix_of(self, sequence: Sequence) -> CachedPrefix | None:
        """Computed prefix of an admitted sequence with its generated tokens; None if it cannot be cached."""
        prefill = sequence.prefill
        if prefill is None or prefill.prefix_cache is None or sequence.phase == "waiting":
            return None
        group = next((each for each in self.groups if sequence in each.sequences), None)
        if group is None:
            return prefill.cached
        tokens, cache = group.computed(sequence), prefill.cached.cache
        if tokens:
            cache = None
            with self.isolation.optional():
                cache = group.copy_of(sequence)
        prompt = sequence.job.inputs["input_ids"][0]
        return replace(prefill.cached, ids=torch.cat((prompt, prompt.new_tensor(tokens))), cache=cache)

    def cache(self, sequence: Sequence, prefix: CachedPrefix) -> None:
        """Puts a prefix into the sequence's prefix cache, if it has one."""
        prefill = sequence.prefill
        if prefill is None or prefill.prefix_cache is None:
            return
        if isinstance(prefix.cache, DynamicCache) and len(prefix.ids) > 0:
            with self.isolation.optional():
                self._executor.keep(prefill, prefix)
