"""Decoding steps of all groups, with speculative decoding if it pays."""

import time

import torch

from ..prefix_cache.memory import PrefixCache
from .drafts import Drafts
from .executor import Executor
from .groups import BatchedGroup, Group
from .pool import Pool
from .sampling import Sampled, sample
from .scheduler import Budget, StepTimes


class Decoding:
    """Runs the decoding steps of a pool.

    Attributes:
        reads_late: True to dispatch a step before the host reads the last one's tokens, so that the GPU does
            not idle.
    """

    def __init__(
        self,
        pool: Pool,
        executor: Executor,
        drafts: Drafts,
        prefix_cache: PrefixCache | None,
        budget: Budget,
        times: StepTimes,
    ):
        self._pool, self._executor, self._drafts = pool, executor, drafts
        self._prefix_cache, self._budget, self._times = prefix_cache, budget, times
        self.reads_late = executor.device.type == "mps"

    def step(self) -> None:
        """Computes one token for each decoding sequence. Raises: errors of the batched step."""
        started = time.perf_counter()
        self._step(self._pool.batch)
        for group in self._pool.groups[1:]:
            with self._pool.isolation.one(group.sequences[0]):
                self._step(group)
        self._times.ended = time.perf_counter()
        if self._pool.is_decoding:
            self._times.step = self._times.ended - started

    def settle(self, group: Group) -> None:
        """Reads the last step's tokens and appends them to their sequences."""
        sampled, group.sampled = group.sampled, None
        if sampled is not None:
            self._hand_out(group, sampled)

    def evict(self, room: int) -> None:
        """Evicts cached prefixes, drafters' included, down to `room` bytes."""
        drafting = self._drafts.drafting
        if self._prefix_cache is not None:
            self._prefix_cache.shrink(room if drafting is None else drafting.shrink(room))

    def _step(self, group: Group) -> None:
        lasts = [each for each in group.sequences if len(each.tokens) + 1 >= each.max_tokens]
        if len(lasts) == len(group.sequences) or any(each.job.processors for each in lasts):
            self.settle(group)  # else a token behind the last one is computed, which processors must not see
        drafts = None
        if isinstance(group, BatchedGroup) and group.sequences:
            drafts = self._drafts.draft(group, lambda: self.settle(group))
            if drafts is not None:
                self._verify(group, drafts)
        if drafts is None and group.sequences:
            self._decode(group)

    def _decode(self, group: Group) -> None:
        """Computes the next token of each sequence without draft tokens."""
        started, sequences, before = time.perf_counter(), [*group.sequences], group.sampled
        if isinstance(group, BatchedGroup):
            self._make_room(group, 1)
        firsts = group.lengths
        out = self._executor.step(group, group.next_tokens(self._executor.device))
        if group.is_batched:
            self._drafts.computed(sequences, firsts, out, [1] * len(sequences))
        group.sampled = sample([each.sampler for each in sequences if each.sampler], out.logits[:, -1])
        if before is not None:
            self._hand_out(group, before)
        if not self.reads_late:
            self.settle(group)
        if group.is_batched and (before is not None or not self.reads_late):
            self._drafts.took(sequences, time.perf_counter() - started)

    def _verify(self, group: BatchedGroup, drafts: list[list[int]]) -> None:
        """Runs a verification step: known tokens and draft tokens of each sequence in one call.

        Each sequence advances by its accepted tokens, as far as the cache can keep them for all rows.
        Accepted tokens beyond that stay known and are recomputed.
        """
        drafting = self._drafts.drafting
        assert drafting is not None
        started, sequences = time.perf_counter(), [*group.sequences]
        rows = [each.row for each in sequences if each.row is not None]
        inputs, known = self._drafts.tokens(group, drafts)
        tokens = len(inputs[0])
        self._make_room(group, tokens)
        self._drafts.hold(group, tokens, known)
        firsts = group.lengths
        out = self._executor.step(group, torch.tensor(inputs).to(self._executor.device))
        sampled = self._drafts.accepted(group, out.logits, known, drafts)
        before = [len(each.tokens) for each in sequences]
        reasons = [
            self._pool.append_all(each, row_tokens)
            for each, row_tokens in zip(sequences, sampled, strict=True)
        ]
        new_counts = [len(each.tokens) - count for each, count in zip(sequences, before, strict=True)]
        right = [count + max(0, new - 1) for count, new in zip(known, new_counts, strict=True)]
        kept = self._drafts.take_back(group, tokens, right)
        self._drafts.computed(sequences, firsts, out, kept)
        drafting.verified(rows, [max(0, len(row_tokens) - 1) for row_tokens in sampled], drafts)
        seconds = (drafting.seconds if any(drafts) else 0.0) + time.perf_counter() - started
        drafting.width.took(len(rows), tokens, seconds)
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason is not None:
                self._pool.end(sequence, reason)

    def _make_room(self, group: BatchedGroup, tokens: int) -> None:
        """Evicts cached prefixes if the batch's cache must be reallocated for `tokens` more."""
        if group.rows.is_full(tokens):
            self._drafts.measure(group.sequences)
            room = self._budget.cached(self._pool.sequences)
            if room is not None:
                self.evict(room)

    def _hand_out(self, group: Group, sampled: Sampled) -> None:
        tokens = sampled.read()
        for sequence, token in zip([*group.sequences], tokens, strict=True):
            self._pool.append(sequence, token)
