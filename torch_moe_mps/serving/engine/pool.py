"""The pool of sequences that have not ended, the groups of those that decode, and how each of them ends."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import DynamicCache

from ..prefix_cache.memory import CachedPrefix, PrefixCache
from .drafts import Drafts
from .executor import Executor
from .groups import Batched, Group
from .isolation import Isolation
from .job import Reason
from .sequence import Phase, Sequence


class Pool:
    """Sequences, and what an error ends of them.

    Attributes:
        sequences: all that have not ended, in the order in which they came to their phases.
        groups: of the decoding ones; the first is the batch.
        isolation: ends them by the errors of blocks.
    """

    def __init__(self, executor: Executor, prefix_cache: PrefixCache | None, drafts: Drafts):
        self._executor, self._prefix_cache, self._drafts = executor, prefix_cache, drafts
        self.sequences: list[Sequence] = []
        self.groups: list[Group] = [self._new_batch()]
        self.isolation = Isolation(self)

    def _new_batch(self) -> Batched:
        return Batched(self._executor.rows(self._drafts))

    @property
    def batch(self) -> Batched:
        """The group of the sequences that are batched."""
        batch = self.groups[0]
        assert isinstance(batch, Batched)
        return batch

    def of_phase(self, phase: Phase) -> list[Sequence]:
        return [each for each in self.sequences if each.phase == phase]

    @property
    def is_decoding(self) -> bool:
        """True if any sequence waits for the next step."""
        return any(group.sequences for group in self.groups)

    def enter(self, sequence: Sequence, phase: Phase) -> None:
        """Moves a sequence to a phase, behind the others of it."""
        sequence.phase = phase
        self.sequences = [*self._without(sequence), sequence]  # at once: other threads count them

    def _without(self, sequence: Sequence) -> list[Sequence]:
        return [each for each in self.sequences if each is not sequence]

    # Tokens

    def append_all(self, sequence: Sequence, tokens: Iterable[int | Exception]) -> Reason | Exception | None:
        """Appends tokens to a sequence until it is complete. Returns: the reason of its end, if any."""
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
            if len(sequence.tokens) >= sampler.most or sampler.is_late:
                return "length"
        return None

    def append(self, sequence: Sequence, token: int | Exception) -> None:
        """Appends a token to a sequence, and ends it if that completes it."""
        if (reason := self.append_all(sequence, [token])) is not None:
            self.end(sequence, reason)

    # Ends

    def end(self, sequence: Sequence, reason: Reason | Exception) -> None:
        """Ends a sequence and caches its computed prefix, except after an error, when it may be wrong."""
        if sequence.phase != "ended":
            self._leave(sequence, None if isinstance(reason, Exception) else self._prefix_of(sequence))
            sequence.job.end(reason)

    def fail_all(self, error: Exception) -> None:
        """Ends all that have begun in the caches of the engine: these may be wrong."""
        failed = [each for each in self.sequences if each.has_begun and each.alone is None]
        self.groups = [self._new_batch()]
        self.sequences = [each for each in self.sequences if each not in failed]
        for sequence in failed:
            sequence.phase = "ended"
            sequence.job.end(error)

    def end_cancelled(self) -> None:
        for sequence in [each for each in self.sequences if each.job.is_cancelled]:
            if sequence.alone is None or sequence.phase != "decoding":  # else `generate` ends it
                self.end(sequence, "cancelled")

    def preempt(self, error: Exception) -> None:
        """Ends the sequence of the batch with the fewest tokens; the others wait to be computed again.

        Some of the layers may have computed the step: the cache is given up.
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
        """Evicts half of the cached prefixes, after an allocation has failed."""
        if self._prefix_cache is not None:
            self._prefix_cache.halve()

    def _leave(self, sequence: Sequence, prefix: CachedPrefix | None = None) -> None:
        """Removes a sequence, and caches its prefix, if there is one."""
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
        """The computed part of a sequence that is admitted: of its prompt, then its tokens, too."""
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
        """Keeps a prefix in the cache of the sequence's prompt, if it has one."""
        prefill = sequence.prefill
        if prefill is None or prefill.prefix_cache is None:
            return
        if isinstance(prefix.cache, DynamicCache) and len(prefix.ids) > 0:
            with self.isolation.optional():
                self._executor.keep(prefill, prefix)
