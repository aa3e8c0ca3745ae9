"""Keys that tokens see: one record, whatever said it, and the choices of indexers joined with masks."""

from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.families.attention import WORD
from ..basics.tensors import notes_in
from .causal_mask import CausalMask
from .chosen_keys import Choice, ChosenMask
from .latents import MOST_TOKENS as MOST_OF_LATENTS

CHOICES = frozenset(("indices", "block_indices"))  # arguments in which a model hands on what an indexer chose
ALL_KEYS = torch.iinfo(torch.int32).max  # a look-ahead
_AT_ONCE = 1024  # tokens whose indices become bits


class Visible(NamedTuple):
    """Keys that T new tokens see; without anything they are the last of the keys, and see all in front.

    Attributes:
        seen: the number of keys up to the last token's own, None for all; later ones do not exist.
        window: how many keys a token sees at most up to its own, which is included.
        lookahead: how many keys after its own a token sees, too.
        key_range: int32 [B, 2], first key of a batch entry and the one behind its last.
        mask: [B or 1, Hk or 1, T, S] of elements or bits, beside which there is nothing else but `seen`.
        indices: int32 [B, Hk or 1, T, K], the only keys that a token sees, whatever its place.
        block: so many neighbouring keys are selected by an index.
        choice: keys that an indexer chooses when attention reads them, in place of all others.
    """

    seen: int | None = None
    window: int | None = None
    lookahead: int = 0
    key_range: Tensor | None = None
    mask: Tensor | None = None
    indices: Tensor | None = None
    block: int = 1
    choice: ChosenMask | None = None

    @classmethod
    def by(
        cls,
        mask: Tensor | None,
        tokens: int,
        window: int | None = None,
        sees_all: bool = False,
        indices: Tensor | None = None,
    ) -> "Visible":
        """Keys that a mask or indices show; without either a single token is the last, several are the first.

        `window` and `sees_all` count without them.
        """
        if indices is not None:
            return cls(indices=indices)
        if mask is None:
            return cls(lookahead=ALL_KEYS) if sees_all else cls(tokens if tokens > 1 else None, window)
        if type(mask) is CausalMask:
            return cls(mask.seen, mask.window, mask.lookahead, mask.key_range)
        return cls(choice=mask) if type(mask) is ChosenMask else cls(mask=mask)

    def chosen(self) -> Iterator[tuple[slice | None, "Visible"]]:
        """(tokens, None for all, and the keys chosen for them), for some tokens at a time."""
        assert self.choice is not None
        indices = self.choice.read_by_one()
        if indices is not None:
            yield None, Visible(indices=indices, block=self.choice.choice.block)
            return
        for tokens, seen, bits in self.choice.slices():
            yield tokens, Visible(seen, mask=bits)


def with_choice(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any], by_operator: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, indices [B, 1, T, K]) of keys that are shown and, where an indexer chose some, chosen.

    Args:
        options: of a call of attention.
        by_operator: whether the operator takes all but the mask.
    """
    indices, blocks = options.get("indices"), options.get("block_indices")
    if isinstance(blocks, Choice):
        return blocks.as_mask(mask, key.shape[1], query.shape[2], key.shape[2]), None
    if blocks is not None:
        of_keys = key.shape[2], query.dtype, query.device, options["position_ids"]
        return module.indexer.build_block_mask(blocks, mask, *of_keys), None
    if indices is None or mask is None:
        return mask, indices
    return _selection(mask, indices, by_operator)


def _selection(mask: Tensor, indices: Tensor, by_operator: bool) -> tuple[Tensor | None, Tensor | None]:
    """(mask, indices [B, 1, T, K]) of keys that are both chosen and shown; exactly one of the two is None.

    A choice of as many keys as there are leaves the causal mask. The operator gets indices for up to
    MOST_OF_LATENTS tokens, so that it reads the chosen keys alone, and a mask of bits for more tokens. Eager
    code, and any other mask, gets a mask of elements in the dtype of `mask`.

    Args:
        mask: [B or 1, 1, T, S], of shown keys.
        indices: [B, T, K], of chosen keys; -1 for none.
        by_operator: whether the operator takes the rest of the call.
    """
    tokens, keys = mask.shape[2:]
    if isinstance(mask, CausalMask):
        if indices.shape[2] >= mask.seen:
            return mask, None
        if by_operator:
            indices = (indices if notes_in(indices).is_in_order else _in_order(indices, mask)).unsqueeze(1)
            return (None, indices) if tokens <= MOST_OF_LATENTS else (_as_bits(indices, keys), None)
    chosen = torch.where(indices < 0, keys, indices).unsqueeze(1).long()
    shown = torch.zeros((*chosen.shape[:3], keys + 1), dtype=torch.bool, device=mask.device)
    shown = shown.scatter(3, chosen, True)[..., :keys]
    elements = mask.elements() if isinstance(mask, CausalMask) else mask
    if mask.dtype == torch.bool:
        return elements & shown, None
    return elements.masked_fill(~shown, torch.finfo(mask.dtype).min), None


def _in_order(indices: Tensor, mask: CausalMask) -> Tensor:
    """The indices [B, T, K] with -1 in place of keys that the mask hides."""
    tokens = mask.shape[2]
    positions = torch.arange(mask.seen - tokens, mask.seen, dtype=torch.int32, device=indices.device)[:, None]
    shown = indices <= positions + mask.lookahead
    if mask.window is not None:
        shown = shown & (indices > positions - mask.window)
    if mask.key_range is not None:
        first, end = mask.key_range[:, :, None, None].unbind(1)
        shown = shown & (indices >= first) & (indices < end)
    return indices.masked_fill(~shown, -1)


def _as_bits(indices: Tensor, keys: int) -> Tensor:
    """The mask of bits of indices [B, 1, T, K], which are distinct but for -1."""
    bits = indices.new_zeros((*indices.shape[:3], ceil(keys / WORD)))
    for few, some in zip(bits.split(_AT_ONCE, 2), indices.split(_AT_ONCE, 2), strict=True):
        bit = torch.where(some < 0, 0, torch.ones_like(some) << (some & (WORD - 1)))
        few.scatter_add_(3, (some.clamp(min=0) >> WORD.bit_length() - 1).long(), bit)
    return bits
