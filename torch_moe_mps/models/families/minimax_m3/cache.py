"""Layers of a cache that also hold the keys by which an indexer chooses blocks."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...caches import growing
from ...caches.buffer import buffer_of, in_buffer_of, start_of
from ...caches.declared import BLOCKS
from ...caches.held import HeldIndex
from ...caches.layers import Growing, LayerBase
from ...upstream.models import DynamicLayer


@runtime_checkable
class _Indexes(Protocol):
    def update_index(self, idx_k: Tensor) -> Tensor: ...


def growing_layer(plain: Any) -> type | None:
    """Class that grows in place for a class of layers that has keys of an indexer."""
    is_own = issubclass(plain, _Indexes) and not issubclass(plain, LayerBase)
    return GrowingBlocks if is_own and plain.update is DynamicLayer.update else None


class GrowingBlocks(Growing, HeldIndex):
    """A layer that holds all tokens, and the keys by which an indexer chooses blocks."""

    declared = BLOCKS
    is_first = True
    idx_keys: Any

    def update_index(self, idx_k: Tensor) -> Tensor:
        if not growing.may_grow():
            return self.plain.update_index(self, idx_k)
        cached = idx_k.new_empty(0) if self.idx_keys is None else self.idx_keys
        (self.idx_keys,) = growing.extended((cached,), (idx_k,))
        return self.idx_keys

    def indexed(self) -> int:
        return 0 if self.idx_keys is None else self.idx_keys.shape[2]

    def reserve_index(self, new: Tensor) -> Tensor | None:
        result = growing.reserved(self.idx_keys, new.unsqueeze(1))
        return None if result is None else result.squeeze(1)

    def take_index(self, keys: Tensor) -> Tensor:
        cached = self.idx_keys
        # unsqueeze would give the one head a stride that is not the buffer's, and no program takes that.
        buffer = buffer_of(cached)
        assert buffer is not None
        self.idx_keys = buffer.part(start_of(cached), keys.shape[1])
        return keys

    def crop(self, tokens_to_remove: int) -> None:
        cached = self.idx_keys
        if cached is None:  # the layer is in another process of a pipeline
            self.idx_keys = self.keys
        super().crop(tokens_to_remove)
        self.idx_keys = None if cached is None else in_buffer_of(cached, self.idx_keys)

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        if self.idx_keys is not None:
            self.idx_keys = growing.with_spare(self.idx_keys, change)
