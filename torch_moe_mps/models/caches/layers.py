"""Layers of a cache that grow in place and may hold 8 bits. `classes` chooses among them.

transformers' DynamicCache copies all old keys and values in every step. Here buffers have spare capacity:
new ones are written behind them, and attention gets views.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..basics.state import KVBits
from ..upstream.models import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from . import growing
from .buffer import columns_of, in_buffer_of
from .declared import DeclaredLayer
from .held import HeldPools
from .quantized_states import can_be_quantized
from .state import LayerState


@torch.compiler.disable
def _update_uncompiled(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`layer.update` outside the graph: a graph cannot make the tensors of a layer in 8 bits."""
    return layer.update(*args, **kwargs)


class LayerBase(CacheLayerMixin):
    """Base of our layers of a cache: copies and pickles have no spare capacity.

    Attributes:
        plain: the class of transformers that it does the same as.
        bits: of keys and values, as in `accelerate`; None for 16.
        empty: makes a layer without its state, of `plain` and `bits`.
        is_first: its methods replace the methods of `plain`, too.
        declared: its declaration; None for an unknown class.
        needs_order: attention sees its tokens by their order: they lie in it.
    """

    is_first = False
    needs_order = False
    plain: Any
    bits: KVBits | None
    empty: Callable[..., Any]
    declared: DeclaredLayer
    keys: Any
    values: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copied or pickled layer has no spare capacity; a dense one is a layer of transformers."""
        state = {name: growing.compact(value) for name, value in LayerState(self).stored().items()}
        if self.bits is not None:
            return self.empty, (self.plain, self.bits), state
        return object.__new__, (self.plain,), state

    def spare_for(self, tokens: int) -> int:
        """Spare capacity of a new buffer for so many tokens."""
        return growing.spare_for(tokens)

    def shown(self, tokens: int, cached: int) -> int:
        """Number of the held tokens that are visible, of so many in all."""
        return cached

    def note_batch(self, tokens: int) -> None:
        """Notes that its buffers have other sequences, or others of their tokens: at most so many of one."""

    @property
    def step(self) -> int:
        """Any multiple of so many tokens is a length to which it can be cut exactly."""
        return 1

    def longest(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, to which it can be cut exactly, of those that it holds."""
        return tokens

    def cut(self, tokens: int) -> None:
        """Drops all but the first `tokens` tokens, and what only later tokens read."""
        self.crop(tokens - self.get_seq_length())


class Growing(LayerBase, DynamicLayer):
    """A layer that holds all tokens.

    Latent attention keeps latents as keys and what turns as values, one head of each: these lie side by side
    in one buffer, which attention reads as keys.

    Attributes:
        has_tiles: it holds tiles; `extend` appends to them.
    """

    holds_latents = True
    has_tiles = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) of all tokens after the new ones [B, H, T, D] were appended in place."""
        if self.bits is not None and torch.compiler.is_compiling():
            return _update_uncompiled(self, key_states, value_states, *args, **kwargs)
        takes_bits = self.bits is not None and self.takes_bits(key_states, value_states)
        if not growing.may_grow():
            if takes_bits:
                self._warn_of_gradients(key_states, value_states)
            return self.plain.update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self.bits is not None and not takes_bits:
                widths = f"keys of {key_states.shape[-1]} and values of {value_states.shape[-1]} elements"
                warnings.warn(
                    f"torch_moe_mps: kv_bits={self.bits!r} is for heads of multiples of 32; {widths} stay as "
                    "they are",
                    stacklevel=2,
                )
        if self.has_tiles:
            return self.extend(key_states, value_states, takes_bits)
        tokens = key_states.shape[-2]
        spare = self._spare(tokens)
        if self.holds_latents and growing.are_latents(key_states, value_states):
            cached, new = (self.keys, self.values), (key_states, value_states)
            keys, values = growing.extended(cached, new, spare, takes_bits)
        else:
            (keys,) = growing.extended((self.keys,), (key_states,), spare, takes_bits)
            (values,) = growing.extended((self.values,), (value_states,), spare, takes_bits)
        return self.take(keys, values, tokens)

    def takes_bits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """True if states can be held in the bits of the layer."""
        return can_be_quantized(key_states, value_states)

    def _warn_of_gradients(self, *states: Tensor) -> None:
        """Raises: ValueError for states that need gradients."""
        if any(tensor.requires_grad for tensor in states):
            raise ValueError(
                f"torch_moe_mps: a cache with kv_bits={self.bits!r} must hold keys and values without "
                "gradients, got some that need them; train with use_cache=False, or with kv_bits=16"
            )
        warnings.warn(
            f"torch_moe_mps: with gradients on, a cache with kv_bits={self.bits!r} holds 16 bits; "
            "torch.no_grad() lets it hold fewer",
            stacklevel=3,
        )

    def extend(self, key_states: Tensor, value_states: Tensor, takes_bits: bool) -> tuple[Tensor, Tensor]:
        """`update` of a layer of tiles, without gradients."""
        raise NotImplementedError

    def _spare(self, tokens: int) -> int | None:
        """Spare capacity of a new buffer; None means `spare_for`."""
        return None

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Takes all keys and values, the last `tokens` new. Returns: the tensors that attention reads."""
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if self.keys is not keys:  # after each token generate() removes none
            self.keys, self.values = map(in_buffer_of, (keys, values), (self.keys, self.values))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_batch(lambda tensor: tensor[indices, ...])

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.get_seq_length() > 0:
            together = growing.latents_together(self.keys, self.values)
            if together is None:
                self.keys, self.values = (
                    growing.with_spare(part, change) for part in (self.keys, self.values)
                )
            else:
                widths = self.keys.shape[3], self.values.shape[3]
                self.keys, self.values = columns_of(growing.with_spare(together, change), widths)


class GrowingIndexed(DynamicIndexedLayer, Growing, HeldPools):
    """A layer that holds all tokens, and the keys of an indexer."""

    rate = 0  # tokens for each pool

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not growing.may_grow():
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        (self.indexer_keys,) = growing.extended((self.indexer_keys,), (indexer_key_states,))
        return self.indexer_keys

    def indexed(self) -> int:
        return self.indexer_keys.shape[1] if self.is_indexer_initialized else 0

    def reserve_index(self, new: Tensor) -> Tensor | None:
        return growing.reserved(self.indexer_keys, new)

    def take_index(self, keys: Tensor) -> Tensor:
        self.indexer_keys = keys
        return keys

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        pools = self.pools
        before = 0 if pools is None else pools.shape[1]
        if before > count or (before and rate != self.rate):  # they are of other keys
            pools, before = None, 0
        if before < count:
            new = pool(before, count)
            (self.pools,) = growing.extended((new.new_empty(0) if pools is None else pools,), (new,))
            self.rate = rate
        return self.pools

    def crop(self, tokens_to_remove: int) -> None:
        indexer_keys, pools = self.indexer_keys, self.pools
        super().crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        self.indexer_keys = in_buffer_of(indexer_keys, self.indexer_keys)
        if pools is not None:
            self.pools = in_buffer_of(pools, pools[:, : self.indexer_keys.shape[1] // self.rate])

    def reset(self) -> None:
        super().reset()
        self.pools, self.is_padded = None, None

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.pools = None  # they are made again

    def note_batch(self, tokens: int) -> None:
        super().note_batch(tokens)
        self.pools, self.is_padded = None, True


class GrowingWindow(Growing, DynamicSlidingWindowLayer):
    """A layer that holds a sliding window, which moves on in its buffer."""

    holds_latents = False
    needs_order = True

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a call attends to; the layer keeps the tokens of its window."""
        window = self.sliding_window
        self.cumulative_length += tokens
        if self.record_past:
            self.keys, self.values = keys, values
            visible = window - 1 + tokens
            return growing.tokens_from(-visible, keys), growing.tokens_from(-visible, values)
        self.keys, self.values = (
            growing.tokens_from(-window + 1, keys),
            growing.tokens_from(-window + 1, values),
        )
        if self._is_prompt(tokens):  # views would keep the buffer of the whole prompt
            spare = self.spare_for(window)
            self.keys, self.values = growing.copied(self.keys, spare), growing.copied(self.values, spare)
        return keys, values

    def _spare(self, tokens: int) -> int:
        return 0 if self._is_prompt(tokens) else self.spare_for(tokens)

    def spare_for(self, tokens: int) -> int:
        return growing.window_spare(self.sliding_window)

    def shown(self, tokens: int, cached: int) -> int:
        return min(self.sliding_window - 1, tokens)

    def note_batch(self, tokens: int) -> None:
        super().note_batch(tokens)
        self.cumulative_length = tokens

    def _is_prompt(self, tokens: int) -> bool:
        return tokens > growing.window_spare(self.sliding_window) and not self.record_past
