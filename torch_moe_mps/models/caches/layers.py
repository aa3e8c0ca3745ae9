"""Layers of a cache that grow in place and may hold 8 bits.

transformers' DynamicCache copies all old keys and values in every step. Here buffers have spare capacity:
new ones are written behind them, and attention gets views.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..upstream.models import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from . import growing
from .buffer import columns_of, in_buffer_of
from .declared import GROWING_CLASSES, DeclaredLayer, declaration_of
from .held import HeldPools
from .quantized_states import can_be_quantized
from .state import LayerState


@functools.cache
def growing_class(plain: type, bits: int | None = None) -> type | None:
    """The class that does what `plain` does and grows in place, or None if there is none."""
    base = _base_of(plain)
    if base is None:
        return None
    bases = (base,) if issubclass(base, plain) else (base, plain) if base.is_first else (plain, base)
    # transformers registers a class under its _layer_type for all models, so this one must have none.
    attributes = {"_layer_type": None, "plain": plain, "bits": bits, "declared": declaration_of(plain)}
    return type(f"Growing{plain.__name__}", bases, attributes)


def _base_of(plain: Any) -> Any:
    result = next(filter(None, (class_of(plain) for class_of in GROWING_CLASSES)), None)
    update = getattr(plain, "update", None)
    if result is not None or issubclass(plain, LayerBase):
        return result
    if update is DynamicLayer.update:
        return GrowingIndexed if issubclass(plain, DynamicIndexedLayer) else Growing
    return GrowingWindow if update is DynamicSlidingWindowLayer.update else None


def _empty_layer(plain: type, bits: int | None) -> Any:
    """A layer without its state, as pickle makes it."""
    cls: Any = growing_class(plain, bits)
    return object.__new__(cls)


@torch.compiler.disable
def _update_uncompiled(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`layer.update` outside the graph: a graph cannot make the tensors of a layer in 8 bits."""
    return layer.update(*args, **kwargs)


class LayerBase(CacheLayerMixin):
    """Base of our layers of a cache: copies and pickles have no spare capacity.

    Attributes:
        plain: the class of transformers that it does the same as.
        bits: 8 for keys and values in 8 bits.
        is_first: its methods replace the methods of `plain`, too.
        declared: its declaration; None for an unknown class.
        needs_order: attention sees its tokens by their order: they lie in it.
    """

    is_first = False
    needs_order = False
    plain: Any
    bits: int | None
    declared: DeclaredLayer
    keys: Any
    values: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copied or pickled layer has no spare capacity; a dense one is a layer of transformers."""
        state = {name: growing.compact(value) for name, value in LayerState(self).stored().items()}
        if self.bits is not None:
            return _empty_layer, (self.plain, self.bits), state
        return object.__new__, (self.plain,), state

    def spare_for(self, tokens: int) -> int:
        """Spare capacity of a new buffer for so many tokens."""
        return growing.spare_for(tokens)

    def shown(self, tokens: int, cached: int) -> int:
        """Number of the held tokens that are visible, of so many in all."""
        return cached

    def note_batch(self, tokens: int) -> None:
        """Notes that its buffers have other sequences, or others of their tokens: at most so many of one."""


class Growing(LayerBase, DynamicLayer):
    """A layer that holds all tokens.

    Latent attention keeps latents as keys and what turns as values, one head of each: these lie side by side
    in one buffer, which attention reads as keys.
    """

    holds_latents = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) of all tokens after the new ones [B, H, T, D] were appended in place."""
        if self.bits is not None and torch.compiler.is_compiling():
            return _update_uncompiled(self, key_states, value_states, *args, **kwargs)
        if not growing.may_grow():
            if self.bits is not None and can_be_quantized(key_states, value_states):
                if key_states.requires_grad or value_states.requires_grad:
                    raise ValueError(
                        "torch_moe_mps: a cache with kv_bits=8 must hold keys and values without gradients, "
                        "got some that need them; train with use_cache=False, or with kv_bits=16"
                    )
                warnings.warn(
                    "torch_moe_mps: with gradients on, a cache with kv_bits=8 holds 16 bits; torch.no_grad() "
                    "lets it hold 8",
                    stacklevel=2,
                )
            return self.plain.update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self.bits is not None and not can_be_quantized(key_states, value_states):
                widths = f"keys of {key_states.shape[-1]} and values of {value_states.shape[-1]} elements"
                warnings.warn(
                    f"torch_moe_mps: kv_bits=8 is for heads of multiples of 32; {widths} stay as they are",
                    stacklevel=2,
                )
        tokens = key_states.shape[-2]
        quantized = self.bits is not None and can_be_quantized(key_states, value_states)
        spare = self._spare(tokens)
        if self.holds_latents and growing.are_latents(key_states, value_states):
            cached, new = (self.keys, self.values), (key_states, value_states)
            keys, values = growing.extended(cached, new, spare, quantized)
        else:
            (keys,) = growing.extended((self.keys,), (key_states,), spare, quantized)
            (values,) = growing.extended((self.values,), (value_states,), spare, quantized)
        return self.take(keys, values, tokens)

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
