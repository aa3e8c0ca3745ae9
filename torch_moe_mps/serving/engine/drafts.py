"""Draft tokens of a batch: when a step has some, and which of them the model accepts."""

import logging
from collections import abc
from collections.abc import Callable
from typing import Any

import torch

from ...transformers.deferred_states import deferrable_layers
from ...transformers.trials.batching import reason_for_order
from ..speculative.drafter import Row
from ..speculative.drafting import Drafting
from ..speculative.verify import Choice, verified
from .groups import Batched
from .scheduler import Budget
from .sequence import Sequence

logger = logging.getLogger(__name__)


class Drafts:
    """Speculative decoding of the sequences of a batch.

    Args:
        drafting: asks the drafters; None for none.
        budget: whose bytes of drafts are measured.

    Attributes:
        drafting: None once no draft token can be verified.
        deferrable: {number of a layer whose states may be updated later: their kind}.
    """

    def __init__(self, model: Any, drafting: Drafting | None, budget: Budget):
        self._model, self.drafting, self._budget = model, drafting, budget
        self.deferrable: dict[int, Any] = {} if drafting is None else deferrable_layers(model)
        self._needs_order: bool | None = None  # attention goes by where keys lie; None: not tried yet

    @property
    def states(self) -> tuple[int, ...]:
        return () if self.drafting is None else self.drafting.states

    def row_of(self, sequence: Sequence) -> Row | None:
        """The tokens of a sequence for the drafters; None where there are none."""
        if self.drafting is None:
            return None
        before, ids = sequence.row, sequence.job.inputs["input_ids"][0].tolist()
        if before is None:
            return Row(ids, len(ids), sequence.job.likely)
        return Row(before.tokens, before.prompt, before.likely)

    def begin(self, group: Batched, sequence: Sequence, reads_whole: bool) -> None:
        """Begins to draft for a sequence that has joined a batch."""
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
        """Tells the drafters that a sequence has ended, or begins again."""
        if sequence.row is not None and self.drafting is not None:
            self.measure([sequence])
            self.drafting.left(sequence.row)

    def measure(self, sequences: abc.Sequence[Sequence]) -> None:
        """Notes what the drafters hold for a token."""
        for row in _rows(sequences):
            if self.drafting is not None:
                held = self.drafting.held(row) / len(row.tokens)
                self._budget.drafts = max(self._budget.drafts, held)

    def computed(
        self,
        sequences: abc.Sequence[Sequence],
        firsts: abc.Sequence[int],
        out: Any,
        counts: abc.Sequence[int],
    ) -> None:
        """Hands the hidden states of so many tokens of each sequence to the drafters."""
        states = self.states
        if self.drafting is not None and states and out.hidden_states is not None:
            wanted = [out.hidden_states[number] for number in states]
            beside = wanted[0] if len(wanted) == 1 else torch.cat(wanted, -1)
            self.drafting.computed(_rows(sequences), firsts, beside, counts)

    def took(self, sequences: abc.Sequence[Sequence], seconds: float) -> None:
        """Notes the time of a step without drafts."""
        if self.drafting is not None:
            self.drafting.width.took(len(sequences), 1, seconds)

    def draft(self, group: Batched, settle: Callable[[], None]) -> list[list[int]] | None:
        """Drafts for each sequence; None where the next step gives each a token without any, or none is left.

        The host has read all tokens where there are drafts. It does not wait for the last one as long as
        there are none.

        Args:
            settle: reads the tokens of the last step.
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

    def tokens(self, group: Batched, drafts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """The tokens of a verification step: for each sequence those that are known, and drafts behind them,
        alike many for all. Returns: these, and how many of each are known.
        """
        assert self.drafting is not None
        rows, ahead, _ = _to_draft(group, 0)
        known = [1 + count for count in ahead]
        filled = [count + len(own) for count, own in zip(known, drafts, strict=True)]
        tokens = min(filled) if self.drafting.width.is_even else max(filled)
        inputs = [
            [*row.tokens[-count:], *own][:tokens] for row, count, own in zip(rows, known, drafts, strict=True)
        ]
        return [own + own[-1:] * (tokens - len(own)) for own in inputs], known

    def hold(self, group: Batched, tokens: int, known: list[int]) -> None:
        """Copies states that draft tokens would change for good."""
        if group.rows.are_states and tokens > min(known):
            group.rows.reserve(tokens)  # moves them
            group.rows.hold()

    def accepted(
        self, group: Batched, logits: Any, known: list[int], drafts: list[list[int]]
    ) -> list[list[Choice]]:
        """The accepted draft tokens of each sequence and the token behind them, or an error at the end."""
        samplers = [each.sampler for each in group.sequences if each.sampler is not None]
        made = verified(samplers, logits, known, drafts)
        for sequence, own, tokens in zip(group.sequences, drafts, made, strict=True):
            count = max(0, len(tokens) - 1)
            sequence.job.usage.accepted_tokens += count
            sequence.job.usage.rejected_tokens += len(own) - count
        return made

    def take_back(self, group: Batched, tokens: int, right: list[int]) -> list[int]:
        """Removes the tokens behind the right ones of each row from the cache, of so many. Where states hold
        all tokens, a row loses all or none; where attention needs the order of keys, all rows lose as many.
        Returns: how many each row keeps.
        """
        wrong = [tokens - min(tokens, count) for count in right]
        if group.rows.are_states:
            wrong = [tokens if count else 0 for count in wrong]
        if self._needs_order:
            wrong = [max(wrong)] * len(wrong)
        if any(wrong):
            group.rows.take_back(wrong)
        return [tokens - count for count in wrong]


def _rows(sequences: abc.Sequence[Sequence]) -> list[Row]:
    return [each.row for each in sequences if each.row is not None]


def _to_draft(group: Batched, unread: int) -> tuple[list[Row], list[int], list[int]]:
    """The rows, how many of their tokens are known that a step has behind its first, and how many drafts
    each may have, where the host has not read so many of their tokens.
    """
    rows = _rows(group.sequences)
    ahead = [len(row.tokens) + unread - n - 1 for row, n in zip(rows, group.lengths, strict=True)]
    return rows, ahead, [max(0, each.most - len(each.tokens) - unread - 1) for each in group.sequences]
