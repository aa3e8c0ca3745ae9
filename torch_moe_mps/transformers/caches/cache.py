"""A key-value cache that grows in place and may hold 8 bits.

transformers' DynamicCache copies all old keys and values in every step. Here their memory has room for more:
new ones are written behind them, and attention gets views.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ...ops.attention import CACHE_BITS
from ..basics.residency import follow_moved
from ..basics.state import NOTHING, STATE, state_of
from . import growing
from .held import HeldEntries, HeldIndex, HeldPools, Pooled
from .quantized_states import QuantizedStates, can_be_quantized

# Attributes of a layer of compressed keys.
_POOLS, _BIASES = "_moe_mps_pools", "_moe_mps_biases"


def grow_caches_in_place(model: nn.Module, bits: int | None = None) -> None:
    """Make the caches that a model is called with grow in place, from the next call on.

    Args:
        bits: of keys and values, as in `accelerate`.
    """
    for module in _decoders(model):
        if bits is not None:
            state_of(module).kv_bits = bits
        if grow_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(grow_cache, with_kwargs=True)


def restore_cache(module: nn.Module) -> None:
    """Undo `grow_caches_in_place` for one module. A cache that grows in place goes on doing so."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is grow_cache]:
        del module._forward_pre_hooks[key]
        del module._forward_pre_hooks_with_kwargs[key]


def grow_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs before a decoder: gives the layers of a plain cache classes that grow in place, or hold 8 bits.

    Weights that have moved are kept resident again.
    """
    cache: Any = kwargs.get("past_key_values", kwargs.get("cache"))  # continuous batching passes `cache`
    if type(cache) is EncoderDecoderCache:
        cache = cache.self_attention_cache
    if cache is None:
        return
    quantizes = module.__dict__.get(STATE, NOTHING).kv_bits == CACHE_BITS
    is_plain = type(cache) is DynamicCache and not cache.offloading
    if quantizes and (type(cache) is StaticCache or (is_plain and torch.compiler.is_compiling())):
        _refuse_8_bits(cache)
    if torch.compiler.is_compiling():
        return
    follow_moved()
    if is_plain:
        _grow(cache, CACHE_BITS if quantizes else None)
        positions = kwargs.get("position_ids", args[2] if len(args) > 2 else None)
        if positions is not None:
            _note_positions(cache, positions)
    elif quantizes and not isinstance(cache, QuantizedCache):
        name = f"{'an offloaded ' if getattr(cache, 'offloading', False) else ''}{type(cache).__name__}"
        warnings.warn(
            f"torch_moe_mps: kv_bits=8 is not for {name}, which keeps keys and values as they are",
            stacklevel=2,
        )


def _refuse_8_bits(cache: Any) -> NoReturn:
    """Raises: RuntimeError for what would fill a cache with 16 bits."""
    got = "a StaticCache" if type(cache) is StaticCache else "a compiled call, which needs a StaticCache"
    raise RuntimeError(
        f"torch_moe_mps: kv_bits=8 needs a DynamicCache, as generate() makes it by default, got {got}; "
        "accelerate(model, kv_bits=16) keeps 16 bits"
    )


def _grow(cache: Any, bits: int | None) -> None:
    for layer in cache.layers:
        plain: Any = type(layer)
        cls = growing_class(plain, bits)
        if cls is not None:
            layer.__class__ = cls


def _note_positions(cache: Any, positions: Tensor) -> None:
    """Compares a call's positions with the cache's, where its layers count tokens by the latter.

    Those of a token that is being captured are not known; those of several are asked for, which ends it.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, _GrowingCompressed) and layer.is_in_order]
    if not layers or (type(positions) is FakeTensor and positions.shape[-1] == 1):
        return
    first, tokens = layers[0].cumulative_length, positions.shape[-1]
    in_order = torch.arange(first, first + tokens, device=positions.device)
    if not bool((positions == in_order).all()):
        for layer in layers:
            layer.is_in_order = False


class QuantizedCache(DynamicCache):
    """A DynamicCache that holds keys and values in 8 bits, about half of the memory of 16.

    Heads whose width is no multiple of 32 stay as they are.

    Args:
        config: of the model that will use the cache.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        _grow(self, CACHE_BITS)


def as_held(layer: Any, bits: int) -> dict[str, Any]:
    """The attributes of a layer of a plain cache; keys and values as a model with these kv_bits has them."""
    plain: Any = type(layer)
    cls = growing_class(plain, bits if bits == CACHE_BITS else None)
    held = dict(vars(layer))
    if getattr(cls, "bits", None) is not None and can_be_quantized(layer.keys, layer.values):
        held |= {name: QuantizedStates.empty(held[name], held[name].shape[2]) for name in ("keys", "values")}
    return held


@functools.cache
def growing_class(plain: type, bits: int | None = None) -> type | None:
    """The class that does what `plain` does and grows in place, or None if there is none."""
    base = _base_of(plain)
    if base is None:
        return None
    bases = (base,) if issubclass(base, plain) else (plain, base)
    if base in (_GrowingBlocks, _GrowingCompressed):
        bases = (base, plain)
    # transformers registers a class under its _layer_type for all models, so this one must have none.
    return type(f"Growing{plain.__name__}", bases, {"_layer_type": None, "plain": plain, "bits": bits})


def pools_padding(config: PreTrainedConfig) -> bool:
    """Whether a layer of a model's cache makes one entry of several tokens, padding among them."""
    plain: list[Any] = [type(layer) for layer in DynamicCache(config=config).layers]
    classes: Iterator[Any] = filter(None, map(growing_class, plain))
    return any(cls.pools_padding for cls in classes)


def _base_of(plain: type) -> type | None:
    update = getattr(plain, "update", None)
    if update is DynamicLayer.update:
        if hasattr(plain, "update_index"):
            return _GrowingBlocks
        return _GrowingIndexed if issubclass(plain, DynamicIndexedLayer) else _Growing
    if update is DynamicSlidingWindowLayer.update:
        return _GrowingWindow
    compresses = hasattr(plain, "store_compression_weights") and not issubclass(plain, _Made)
    return _GrowingCompressed if compresses else None


def _empty_layer(plain: type, bits: int | None) -> Any:
    """A layer without its state, as pickle makes it."""
    cls: Any = growing_class(plain, bits)
    return object.__new__(cls)


def _decoders(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost models of transformers that take a cache; calls of the outer models reach them."""
    found = {m for m in model.modules() if isinstance(m, PreTrainedModel) and takes_cache(m)}
    for module in found:
        if not any(inner in found for inner in module.modules() if inner is not module):
            yield module


def takes_cache(model: nn.Module) -> bool:
    return "past_key_values" in inspect.signature(model.forward).parameters


@torch.compiler.disable
def _update_uncompiled(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`layer.update` outside the graph: a graph cannot make the tensors of a layer in 8 bits."""
    updated: tuple[Tensor, Tensor] = layer.update(*args, **kwargs)
    return updated


_MADE_AGAIN = ("pools", "is_in_order")  # what a copy of a layer makes again


class _Made(CacheLayerMixin):
    """What our layers of a cache share: copies and pickles are without the spare room.

    Attributes:
        plain: the class of transformers that it does the same as.
        bits: 8 where it holds keys and values in 8 bits.
        pools_padding: it makes one entry of several tokens, padding among them.
    """

    pools_padding = False
    plain: Any
    bits: int | None
    keys: Any
    values: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copied or pickled layer has no room. A dense one is a plain one, which needs no package."""
        state = {
            name: growing.compact(value) for name, value in self.__dict__.items() if name not in _MADE_AGAIN
        }
        if self.bits is not None:
            return _empty_layer, (self.plain, self.bits), state
        return object.__new__, (self.plain,), state


class _Growing(_Made, DynamicLayer):
    """A layer that holds all tokens.

    Latent attention keeps latents as keys and what turns as values, one head of each: these lie side by side
    in one memory, which attention reads as keys.
    """

    holds_latents = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.bits is not None and torch.compiler.is_compiling():
            return _update_uncompiled(self, key_states, value_states, *args, **kwargs)
        if not growing.may_grow():
            if self.bits is not None and can_be_quantized(key_states, value_states):
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
        room = self._room(tokens)
        if self.holds_latents and growing.are_latents(key_states, value_states):
            held, new = (self.keys, self.values), (key_states, value_states)
            keys, values = growing.extended(held, new, room, quantized)
        else:
            (keys,) = growing.extended((self.keys,), (key_states,), room, quantized)
            (values,) = growing.extended((self.values,), (value_states,), room, quantized)
        return self.take(keys, values, tokens)

    def _room(self, tokens: int) -> int | None:
        """How many more tokens new memory has room for; None means `room_behind`."""
        return None

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Takes all keys and values, of which the last `tokens` are new. Returns: what attention reads."""
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if self.keys is not keys:  # after each token generate() removes none
            self.keys, self.values = (
                growing.in_memory_of(keys, self.keys),
                growing.in_memory_of(values, self.values),
            )

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
                    growing.with_room(self.keys, change),
                    growing.with_room(self.values, change),
                )
            else:
                widths = self.keys.shape[3], self.values.shape[3]
                self.keys, self.values = growing.columns_of(growing.with_room(together, change), widths)


class _GrowingIndexed(DynamicIndexedLayer, _Growing, HeldPools):
    """A layer that holds all tokens, and the keys of an indexer."""

    pools: Any = None  # rows that stand for several keys, which their indexer makes
    rate = 0  # of pools

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not growing.may_grow():
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        (self.indexer_keys,) = growing.extended((self.indexer_keys,), (indexer_key_states,))
        return self.indexer_keys

    def indexed(self) -> int:
        return self.indexer_keys.shape[1] if self.is_indexer_initialized else 0

    def index_slots(self, new: Tensor) -> Tensor | None:
        return growing.slots_behind(self.indexer_keys, new)

    def index_slots_of(self, columns: Sequence[Tensor]) -> Tensor | None:
        batch, tokens, _ = columns[0].shape
        width = sum(part.shape[2] for part in columns)
        slots = self.index_slots(columns[0].new_empty(1).expand(batch, tokens, width))
        if slots is not None:
            torch.cat(list(columns), -1, out=slots.narrow(1, slots.shape[1] - tokens, tokens))
        return slots

    def take_index(self, keys: Tensor) -> Tensor:
        self.indexer_keys = keys
        return keys

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        held = self.pools
        before = 0 if held is None else held.shape[1]
        if before < count:
            new = pool(before, count)
            (self.pools,) = growing.extended((new.new_empty(0) if held is None else held,), (new,))
            self.rate = rate
        pools: Tensor = self.pools
        return pools

    def crop(self, tokens_to_remove: int) -> None:
        indexer_keys, pools = self.indexer_keys, self.pools
        super().crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        self.indexer_keys = growing.in_memory_of(indexer_keys, self.indexer_keys)
        if pools is not None:
            self.pools = growing.in_memory_of(pools, pools[:, : self.indexer_keys.shape[1] // self.rate])

    def reset(self) -> None:
        super().reset()
        self.pools, self.is_padded = None, None

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.pools = None  # which are made again


class _GrowingBlocks(_Growing, HeldIndex):
    """A layer that holds all tokens, and the keys by which an indexer chooses blocks (MiniMax M3)."""

    idx_keys: Any

    def update_index(self, idx_k: Tensor) -> Tensor:
        if not growing.may_grow():
            keys: Tensor = self.plain.update_index(self, idx_k)
            return keys
        held = idx_k.new_empty(0) if self.idx_keys is None else self.idx_keys
        (self.idx_keys,) = growing.extended((held,), (idx_k,))
        return self.idx_keys

    def indexed(self) -> int:
        return 0 if self.idx_keys is None else self.idx_keys.shape[2]

    def index_slots(self, new: Tensor) -> Tensor | None:
        found = growing.slots_behind(self.idx_keys, new.unsqueeze(1))
        return None if found is None else found.squeeze(1)

    def take_index(self, keys: Tensor) -> Tensor:
        held = self.idx_keys
        # unsqueeze would give the one head a stride that is not the memory's, and no program takes that.
        self.idx_keys = growing.shown(getattr(held, growing.MEMORY), growing.start_of(held), keys.shape[1])
        return keys

    def crop(self, tokens_to_remove: int) -> None:
        held = self.idx_keys
        super().crop(tokens_to_remove)
        if self.idx_keys is not held:
            self.idx_keys = growing.in_memory_of(held, self.idx_keys)

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        if self.idx_keys is not None:
            self.idx_keys = growing.with_room(self.idx_keys, change)


class _GrowingWindow(_Growing, DynamicSlidingWindowLayer):
    """A layer that holds a sliding window, which moves on in its memory."""

    holds_latents = False

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
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
        if self._is_prompt(tokens):  # as views they would keep the memory of the whole prompt
            room = growing.room_behind_window(window)
            self.keys, self.values = growing.copied(self.keys, room), growing.copied(self.values, room)
        return keys, values

    def _room(self, tokens: int) -> int:
        return 0 if self._is_prompt(tokens) else growing.room_behind_window(self.sliding_window)

    def _is_prompt(self, tokens: int) -> bool:
        return tokens > growing.room_behind_window(self.sliding_window) and not self.record_past


class _GrowingCompressed(_GrowingWindow, HeldEntries):
    """A layer that holds a window of keys, which are the values, too, and compressed ones (DeepSeek-V4).

    What the last tokens have, of which entries are made, is in `pools` while the operator makes them, and in
    the buffers of transformers' class while that does: each starts from what the other has left.
    """

    is_croppable = False
    pools_padding = True
    compress_rate: int
    entry_count: dict[str, int]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not growing.may_grow():
            updated: tuple[Tensor, Tensor] = self.plain.update(self, key_states, value_states)
            return updated
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self.bits is not None:
                warnings.warn("torch_moe_mps: kv_bits=8 leaves compressed keys as they are", stacklevel=2)
        tokens = key_states.shape[-2]
        (keys,) = growing.extended((self.keys,), (key_states,), self._room(tokens))
        return self.take(keys, keys, tokens)

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        seen = super().take(keys, keys, tokens)
        self.values = self.keys
        return seen

    def slots(self, new: Tensor) -> Tensor | None:
        return growing.slots_behind(self.keys, new)

    def pooled(self, name: str, kv: Tensor, width: int, position_bias: Tensor) -> Pooled:
        tokens, closed = kv.shape[1], self.cumulative_length // self.compress_rate
        if name in self.pools and not growing.may_write(self.pools[name], kv):
            self._leave(name, tokens)
        state = self.pools.get(name)
        if state is None:
            self.biases[name] = position_bias.detach()  # transformers' class keeps sums with it
            state = self._state_of_buffers(name, kv, width, self.cumulative_length - tokens)
        held = self.compressed_kv[name]
        memory: Any = getattr(held, growing.MEMORY, None)
        if memory is None or not growing.may_write(memory, kv) or closed > memory.shape[1]:
            memory = kv.new_empty(kv.shape[0], closed + growing.room_behind(closed), width)
            if held is not None:
                memory[:, : held.shape[1]] = held
        self.pools[name] = state
        self.compressed_kv[name] = growing.view_of(memory, 0, closed)
        self.entry_count[name] = closed
        return Pooled(state, memory)

    @property
    def pools(self) -> dict[str, Tensor]:
        """{name: [B, rate or 2 rate, 2, W]}, the last tokens as `pool_window_` keeps them."""
        found: dict[str, Tensor] = self.__dict__.setdefault(_POOLS, {})
        return found

    @property
    def biases(self) -> dict[str, Tensor]:
        """{name: [rate, W]}, the position bias of each compressor."""
        found: dict[str, Tensor] = self.__dict__.setdefault(_BIASES, {})
        return found

    def _state_of_buffers(self, name: str, kv: Tensor, width: int, position: int) -> Tensor:
        """The state that transformers' buffers describe, before `position` tokens."""
        (batch, _, columns), rate = kv.shape, self.compress_rate
        overlaps = columns > width
        state = kv.new_zeros(batch, rate * (2 if overlaps else 1), 2, columns)
        kinds = ((self.buffer_kv, "overlap_kv"), (self.buffer_gate, "overlap_gate"))
        for kind, (buffer, overlap) in enumerate(kinds):
            open_rows = buffer[name]
            if open_rows is not None and open_rows.shape[1]:
                places = torch.arange(position - open_rows.shape[1], position, device=kv.device)
                state[:, places % state.shape[1], kind] = open_rows.to(kv.dtype)
            before = getattr(self, overlap)[name] if overlaps else None
            if before is not None:
                places = torch.arange(rate, device=kv.device) + (position // rate - 1) * rate
                bias = self.biases[name][:, :width] if kind else 0.0
                state[:, places % state.shape[1], kind, :width] = (before - bias).to(kv.dtype)
            buffer[name] = None
        return state

    def _leave(self, name: str, tokens: int = 0) -> None:
        """Leaves what transformers' class holds in front of the last `tokens` that `update` has counted."""
        if name not in self.__dict__.get(_POOLS, ()):
            return
        state, bias = self.pools.pop(name), self.biases.pop(name)
        if not self.pools:
            self._forget()
        rate, position = self.compress_rate, self.cumulative_length - tokens
        rows, columns = state.shape[1], state.shape[3]
        held = self.compressed_kv[name].shape[2]
        places = torch.arange(position // rate * rate, position, device=state.device) % rows
        self.buffer_kv[name], self.buffer_gate[name] = state[:, places].unbind(2)
        if columns > held and position >= rate:
            places = torch.arange(position // rate * rate - rate, position // rate * rate) % rows
            before, gate = state[:, places.to(state.device), :, :held].unbind(2)
            self.overlap_kv[name], self.overlap_gate[name] = before, gate + bias[:, :held]

    def _forget(self) -> None:
        for name in (_POOLS, _BIASES):
            self.__dict__.pop(name, None)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        self._leave(name, kv.shape[1])
        found: tuple[Tensor, Tensor, int] = self.plain.store_compression_weights(self, name, kv, gate)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        for name in [*self.pools]:
            self._leave(name)
        made, arguments, state = super().__reduce_ex__(protocol)
        for name, value in state.items():
            if type(value) is dict:
                state[name] = {each: growing.compact(held) for each, held in value.items()}
        return made, arguments, state

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: RuntimeError, for a window of tokens that is complete cannot be opened again."""
        if tokens_to_remove != 0:
            raise RuntimeError(
                "torch_moe_mps: a cache of compressed keys cannot be cropped: their tokens are not kept"
            )

    def reset(self) -> None:
        super().reset()
        self._forget()
        self.__dict__.pop("is_in_order", None)

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.values = self.keys
        for place, held in self.__dict__.items():
            for name, tensor in held.items() if type(held) is dict and place != _BIASES else ():
                if isinstance(tensor, Tensor):
                    held[name] = growing.with_room(tensor, change)
