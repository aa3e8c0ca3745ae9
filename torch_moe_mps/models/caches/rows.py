"""Sequences of a batch on the device: masks and positions of their next tokens, and uncommitted tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..basics.tensors import NO_END, notes_on


class RowPlaces:
    """Places of the tokens of sequences, on the device; copied to it only when they change.

    Args:
        context: tokens for which masks have room at first.
    """

    def __init__(self, device: torch.device, context: int):
        self._device, self._context, self._rows = device, context, 0
        self._shown = self._range = self._positions = torch.empty(0, device=device)

    def place(self, lengths: Sequence[int], moved: Sequence[int], capacity: int) -> None:
        """Sequences have other lengths, or lie in memory of another capacity.

        Args:
            moved: how far the positions of each sequence are from its number of tokens.
        """
        self._rows, end = len(lengths), max(lengths)
        while self._context < capacity:  # one size for all, so that strides of masks stay
            self._context *= 2
        places = [[end - n, NO_END, n + by] for n, by in zip(lengths, moved, strict=True)]
        of_rows = torch.tensor(places).to(self._device)
        self._range, self._positions = of_rows[:, :2].int(), of_rows[:, 2:].contiguous()
        if self._rows > 1:
            shown = torch.arange(self._context, device=self._device) >= self._range[:, :1]
            if shown.stride() != (self._context, 1):
                shown = shown.contiguous()
            self._shown = shown

    def advance(self, tokens: int) -> None:
        """Each sequence has so many tokens more; fewer, if it is below 0."""
        self._positions = self._positions + tokens

    def positions(self, tokens: int) -> Tensor:
        """The positions [B, T] of the next tokens of each sequence."""
        if tokens == 1:
            return self._positions
        return self._positions + torch.arange(tokens, device=self._device)

    def mask(self, end: int) -> Tensor | None:
        """The keys [B, end] that each sequence shows, with their range; None for a single one."""
        if self._rows == 1:
            return None
        shown = self._shown[: self._rows, :end]
        notes_on(shown).key_range = (self._range,)
        return shown


class Uncommitted:
    """Number of accepted uncommitted tokens of each sequence.

    Attributes:
        rows: the counts; each change makes another list.
    """

    def __init__(self) -> None:
        self.rows, self._told = list[int](), list[int]()
        self._counts: Tensor | None = None  # on the device; None where no layer has uncommitted tokens

    def tell(self, layers: Iterable[Any], device: torch.device) -> None:
        """Sets the counts of layers after these, or their sequences, have changed."""
        deferring = [*layers]
        self._counts = _column(self.rows).to(device) if deferring else None
        self._told = self.rows
        for layer in deferring:
            layer.set_counts(self._counts)

    def update(self) -> None:
        """Copies the counts to the device, if they are others than it was told."""
        if self._counts is not None and self.rows != self._told:
            self._counts.copy_(_column(self.rows))
            self._told = self.rows

    def advance(self, tokens: int) -> None:
        """A call has computed so many tokens of each row: several stay uncommitted."""
        if self._counts is not None:
            self.rows = [tokens if tokens > 1 else 0] * len(self.rows)

    def take_back(self, tokens: Sequence[int]) -> None:
        if self._counts is not None:
            self.rows = [count - by for count, by in zip(self.rows, tokens, strict=True)]


def _column(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)[:, None]
