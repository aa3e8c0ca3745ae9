"""Speculative decoding of a batch: when to draft, and which draft tokens the model accepts."""

import logging
from collections import abc
from collections.abc import Callable
from typing import Any

import torch

from ...models.programs import reason_for_order
from ...transformers.deferrable import deferrable_layers
from .drafter import DraftedSequence
from .drafting import Drafting
from .groups import BatchedGroup
from .scheduler import Budget
from .sequence import Sequence
from .verify import Choice, verified

logger = logging.getLogger(__name__)


class Drafts:
    """Speculative decoding of the sequences of a batch.

    Args:
        drafting: the drafters; None disables speculative decoding.
        budget: records the bytes that drafters hold.

    Attributes:
        drafting: None once no draft token can be verified.
        deferrable: {layer index: kind of its recurrent states} where state updates can be deferred.
    """

    def __init__(self, model: Any, drafting: Drafting | None, budget: Budget):
        self._model, self.drafting, self._budget = model, drafting, budget
        self.deferrable: dict[int, Any] = {} if drafting is None else deferrable_layers(model)
        self._needs_order: bool | None = None  # attention goes by where keys lie; None: not tried yet

    @property
    def states(self) -> tuple[int, ...]:
        return () if self.drafting is None else self.drafting.states

    def row_of(self, sequence: Sequence) -> DraftedSequence | None:
        """Token history of a sequence for the drafters; None without drafters."""
        if self.drafting is None:
            return None
        if (before := sequence.row) is not None:
            return DraftedSequence(before.tokens, before.prompt)
        ids = sequence.job.inputs["input_ids"][0].tolist()
        return DraftedSequence(ids, len(ids))

    def start(self, group: BatchedGroup, sequence: Sequence, reads_whole: bool) -> None:
        """Sets up drafting after a sequence was added to a batch."""
        if self.drafting is None:
            return
        if reads_whole:
            kind = type(self._model).__name__
            self.drafting.give_up(f"{kind} does not read several tokens behind a cache rightly")
            self.drafting = None
            return
        if len(group.sequences) == 2 and self._needs_order is None:
            reason = reason_for_order(self._model)
            self._needs_order = reason is not None
            if reason is not None:
                logger.warning(
                    "torch_moe_mps: each sequence accepts as many draft tokens as all others do: %s", reason
                )
        self.drafting.width.is_even = bool(self._needs_order) or group.rows.are_states

    def left(self, sequence: Sequence) -> None:
        """Releases the drafters' state for a sequence that ended or restarts."""
        if sequence.row is not None and self.drafting is not None:
            self.measure([sequence])
            self.drafting.left(sequence.row)

    def measure(self, sequences: abc.Sequence[Sequence]) -> None:
        """Updates the budget with the bytes per token that the drafters hold."""
        for row in _rows(sequences):
            if self.drafting is not None:
                bytes_per_token = self.drafting.held(row) / len(row.tokens)
                self._budget.drafts = max(self._budget.drafts, bytes_per_token)

    def computed(
        self,
        sequences: abc.Sequence[Sequence],
        firsts: abc.Sequence[int],
        out: Any,
        counts: abc.Sequence[int],
    ) -> None:
        """Passes the hidden states of `counts` tokens of each sequence to the drafters."""
        states = self.states
        if self.drafting is not None and states and out.hidden_states is not None:
            wanted = [out.hidden_states[number] for number in states]
            beside = wanted[0] if len(wanted) == 1 else torch.cat(wanted, -1)
            self.drafting.computed(_rows(sequences), firsts, beside, counts)

    def took(self, sequences: abc.Sequence[Sequence], seconds: float) -> None:
        """Records the duration of a step without draft tokens."""
        if self.drafting is not None:
            self.drafting.width.took(len(sequences), 1, seconds)

    def draft(self, group: BatchedGroup, settle: Callable[[], None]) -> list[list[int]] | None:
        """Draft tokens of each sequence; None if the next step should decode without drafting.

        The host reads the last step's tokens only if drafting may pay.

        Args:
            settle: reads the last step's tokens.
        """
        drafting = self.drafting
        if drafting is None:
            return None
        if group.sampled is not None:
            rows, ahead, room = _to_draft(group, 1)
            if not drafting.may_pay(rows, ahead, room):
                return None
            settle()
            if not group.sequences:
                return None
        rows, ahead, room = _to_draft(group, 0)
        found = drafting.draft(rows, ahead, room)
        return [[] for _ in rows] if found is None and any(ahead) else found

    def tokens(self, group: BatchedGroup, drafts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Input tokens of a verification step, of equal count per sequence: known tokens, then draft tokens.

        Returns: the tokens, and the number of known ones of each sequence.
        """
        assert self.drafting is not None
        rows, ahead, _ = _to_draft(group, 0)
        known = [1 + count for count in ahead]
        filled = [count + len(row_draft) for count, row_draft in zip(known, drafts, strict=True)]
        tokens = min(filled) if self.drafting.width.is_even else max(filled)
        inputs = [
            [*row.tokens[-count:], *row_draft][:tokens]
            for row, count, row_draft in zip(rows, known, drafts, strict=True)
        ]
        return [row_input + row_input[-1:] * (tokens - len(row_input)) for row_input in inputs], known

    def hold(self, group: BatchedGroup, tokens: int, known: list[int]) -> None:
        """Copies recurrent states that draft tokens would overwrite."""
        if group.rows.are_states and tokens > min(known):
            group.rows.reserve(tokens)  # moves them
            group.rows.hold()

    def accepted(
        self, group: BatchedGroup, logits: Any, known: list[int], drafts: list[list[int]]
    ) -> list[list[Choice]]:
        """Accepted draft tokens of each sequence, followed by the next sampled token or an error."""
        samplers = [each.sampler for each in group.sequences if each.sampler is not None]
        results = verified(samplers, logits, known, drafts)
        for sequence, row_draft, tokens in zip(group.sequences, drafts, results, strict=True):
            count = max(0, len(tokens) - 1)
            sequence.job.usage.accepted_tokens += count
            sequence.job.usage.rejected_tokens += len(row_draft) - count
        return results

    def take_back(self, group: BatchedGroup, tokens: int, right: list[int]) -> list[int]:
        """Removes rejected tokens from the cache. Returns: the number of tokens that each row keeps.

        With recurrent states, a row loses all tokens or none. If attention depends on the order of keys, all
        rows lose equally many.

        Args:
            tokens: computed in this step, for each row.
            right: accepted ones of each row.
        """
        wrong = [tokens - min(tokens, count) for count in right]
        if group.rows.are_states:
            wrong = [tokens if count else 0 for count in wrong]
        if self._needs_order:
            wrong = [max(wrong)] * len(wrong)
        if any(wrong):
            group.rows.take_back(wrong)
        return [tokens - count for count in wrong]


def _rows(sequences: abc.Sequence[Sequence]) -> list[DraftedSequence]:
    return [each.row for each in sequences if each.row is not None]


def _to_draft(group: BatchedGroup, unread: int) -> tuple[list[DraftedSequence], list[int], list[int]]:
    """(rows, known tokens after the first uncomputed one, maximum number of draft tokens), each by row.

    Args:
        unread: sampled tokens of each row that the host has not read.
    """
    rows = _rows(group.sequences)
    ahead = [len(row.tokens) + unread - n - 1 for row, n in zip(rows, group.lengths, strict=True)]
    return rows, ahead, [max(0, each.max_tokens - len(each.tokens) - unread - 1) for each in group.sequences]
