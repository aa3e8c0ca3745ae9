"""Questions that a rule may ask of a layer of a cache that grows in place.

`cache` has such layers; of any other a rule asks what transformers' code does. Shapes: B sequences, S tokens
that are held, T new ones. A method that writes nothing itself reserves capacity: it
returns the current content with room for the new ones after it, into which an operator writes. The layer has
them once it takes this view.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class HeldIndex:
    """The keys of an indexer [B, S, D]."""

    def indexed(self) -> int:
        """S."""
        raise NotImplementedError

    def reserve_index(self, new: Tensor) -> Tensor | None:
        """View [B, S + T, D] with capacity reserved for new keys [B, T, D]; None without capacity."""
        raise NotImplementedError

    def take_index(self, keys: Tensor) -> Tensor:
        """The view that `reserve_index` returned, now the layer's keys: its last tokens have been written."""
        raise NotImplementedError


class HeldPools(HeldIndex):
    """The keys of an indexer, and rows that stand for several of them.

    Attributes:
        indexer_keys: [B, S, D], or what transformers starts with.
        pools: the rows that are held, or None: they are made again of the keys.
        is_padded: whether any sequence has had padding, as the indexer notes; None where nothing is noted.
    """

    indexer_keys: Any
    pools: Any = None
    is_padded: bool | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Writes new keys [B, T, D] behind the held ones. Returns: all."""
        raise NotImplementedError

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        """[B, count, D], a row for each `rate` keys: pool(first, count) makes the missing ones."""
        raise NotImplementedError


class HeldEntries:
    """Entries that stand for several tokens each.

    Attributes:
        cumulative_length: all tokens so far.
        is_in_order: all calls had the positions that follow from the order of tokens. With others, which
            tokens see an entry is for the model's eager code to say.
    """

    cumulative_length: int
    is_in_order = True
