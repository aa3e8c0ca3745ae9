"""Keys that an indexer has chosen for sparse attention.

They are chosen when attention reads them: for some tokens of a prompt at a time, so that the choice never
exists for all of them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.families.attention import bits_as_bool
from .causal_mask import AND, CausalMask, additive

ops = torch.ops.moe_mps

_AT_ONCE = 1024  # tokens of a prompt whose masks of bits exist at a time


class Choice(NamedTuple):
    """Arguments of `_index_topk` to choose keys for T new tokens.

    Attributes:
        q: [B, T, Hi, D].
        k: [B, S, D], or a row for each block.
        block: so many neighbouring keys are chosen together.
        options: the rest by name.
        is_pooled: k has a row for each block.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None
    top_k: int
    scale: float
    block: int
    options: dict[str, Any]
    is_pooled: bool = False

    def chosen(self, first: int, last: int, seen: int, **options: Any) -> Tensor:
        """Keys chosen for tokens [first, last); token last - 1 sees the first `seen` keys."""
        weights = None if self.weights is None else self.weights[:, first:last]
        k = self.k if self.is_pooled else self.k[:, :seen]
        options |= {"keys": seen} if self.is_pooled else {}
        if self.block > 1:
            options["block"] = self.block
        return ops._index_topk(
            self.q[:, first:last], k, weights, self.top_k, self.scale, **self.options, **options
        )

    def as_mask(self, mask: Tensor | None, heads: int, tokens: int, keys: int) -> Tensor:
        """The mask of attention, [B, 1 or Hk, T, S]: the selected keys that `mask` shows.

        None shows a token everything.
        """
        if mask is None:
            mask = CausalMask((self.q.shape[0], 1, tokens, keys), keys, None, torch.bool, self.q.device)
        if type(mask) is CausalMask and mask.window is None and mask.lookahead == 0:
            return ChosenMask(self, mask, heads)
        plain = CausalMask((self.q.shape[0], 1, tokens, keys), keys, None, torch.bool, self.q.device)
        chosen = ChosenMask(self, plain, heads).elements()
        if mask.dtype == torch.bool:
            return mask & chosen
        return torch.where(chosen, mask, torch.finfo(mask.dtype).min)


class ChosenMask(CausalMask):
    """Mask [B, Hk or 1, T, S] of the visible keys that an indexer has chosen.

    Attributes:
        choice: of the keys, or of blocks of them.
    """

    choice: Choice

    @staticmethod
    def __new__(cls, choice: Choice, mask: CausalMask, heads: int) -> "ChosenMask":
        batch, _, tokens, keys = mask.shape
        shape = (batch, heads, tokens, keys)
        chosen_mask: Any = super().__new__(
            cls, shape, mask.seen, None, mask.dtype, mask.device, mask.key_range
        )
        chosen_mask.choice = choice
        return chosen_mask

    def read_by_one(self) -> Tensor | None:
        """Keys that a single token reads, [B, Hk or 1, 1, K], in blocks; None if it needs a mask."""
        tokens, keys = self.shape[2:]
        if tokens != 1 or self.key_range is not None or self.seen != keys:
            return None
        chosen = self.choice.chosen(0, 1, keys)
        return chosen if chosen.dim() == 4 else chosen.unsqueeze(1)

    def slices(self) -> Iterator[tuple[slice, int, Tensor]]:
        """(tokens, how many keys they see, the mask of bits of these), for some tokens at a time."""
        tokens = self.shape[2]
        for first in range(0, tokens, _AT_ONCE):
            last = min(first + _AT_ONCE, tokens)
            seen = self.seen - (tokens - last)
            options = {} if self.key_range is None else {"key_range": self.key_range}
            yield slice(first, last), seen, self.choice.chosen(first, last, seen, as_bits=True, **options)

    def elements(self) -> Tensor:
        if self._elements is None:
            mask = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            for tokens, seen, bits in self.slices():
                mask[:, :, tokens, :seen] = bits_as_bool(bits, seen)
            self._elements = mask if self.dtype == torch.bool else additive(mask, self.dtype)
        return self._elements

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in AND and type(args[1]) is ChosenMask and type(args[0]) is CausalMask:
            return args[1]  # it was made of that mask
        return NotImplemented
