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

from ..ops.attention import CACHE_BITS
from .basics.state import NOTHING, STATE, state_of
from .modules.rules.compressed_attention import Pooled
from .quantized_states import PLAIN, QuantizedStates, can_be_quantized

# New memory has room for a sixteenth more: it stays small, and a token is copied 17 times at most.
ROOM_SHARE = 16
LEAST_ROOM = 256  # tokens
# A window moves to new memory when it has moved on by an eighth of its length.
WINDOW_ROOM_SHARE = 8
LEAST_WINDOW_ROOM = 64  # tokens
# The attribute of a view that names the memory it lies in, [..., capacity, D], and one of this memory: the
# token behind the last that was written.
MEMORY = "_moe_mps_memory"
END = "_moe_mps_end"
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
    """Runs before a decoder: gives the layers of a plain cache classes that grow in place, or hold 8 bits."""
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
    if is_plain:
        _grow(cache, CACHE_BITS if quantizes else None)
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
        growing = growing_class(plain, bits)
        if growing is not None:
            layer.__class__ = growing


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
    growing = growing_class(plain, bits if bits == CACHE_BITS else None)
    held = dict(vars(layer))
    if getattr(growing, "bits", None) is not None and can_be_quantized(layer.keys, layer.values):
        held |= {name: QuantizedStates.empty(held[name], held[name].shape[2]) for name in ("keys", "values")}
    return held


def room_behind(tokens: int) -> int:
    """For how many more tokens new memory has room that is made for `tokens` tokens."""
    return max(LEAST_ROOM, tokens // ROOM_SHARE)


def room_behind_window(window: int) -> int:
    return max(LEAST_WINDOW_ROOM, window // WINDOW_ROOM_SHARE)


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


def _in_place() -> bool:
    """Whether a cache may write into memory that earlier results lie in.

    With gradients on, a backward may still need these results; compilers have static caches instead.
    """
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@torch.compiler.disable
def _update_uncompiled(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`layer.update` outside the graph: a graph cannot make the tensors of a layer in 8 bits."""
    updated: tuple[Tensor, Tensor] = layer.update(*args, **kwargs)
    return updated


_MADE_AGAIN = ("pools",)  # what a copy of a layer makes again


class _Made(CacheLayerMixin):
    """What our layers of a cache share: copies and pickles are without the spare room."""

    plain: Any
    bits: int | None
    keys: Any
    values: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """A copied or pickled layer has no room. A dense one is a plain one, which needs no package."""
        state = {name: _compact(value) for name, value in self.__dict__.items() if name not in _MADE_AGAIN}
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
        if not _in_place():
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
        if self.holds_latents and _are_latents(key_states, value_states):
            held, new = (self.keys, self.values), (key_states, value_states)
            keys, values = _joined(held, new, room, quantized)
        else:
            (keys,) = _joined((self.keys,), (key_states,), room, quantized)
            (values,) = _joined((self.values,), (value_states,), room, quantized)
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
        self.keys, self.values = _in_memory_of(keys, self.keys), _in_memory_of(values, self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_batch(lambda tensor: tensor[indices, ...])

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.get_seq_length() > 0:
            together = latents_together(self.keys, self.values)
            if together is None:
                self.keys, self.values = _with_room(self.keys, change), _with_room(self.values, change)
            else:
                widths = self.keys.shape[3], self.values.shape[3]
                self.keys, self.values = _columns(_with_room(together, change), widths)


class _GrowingIndexed(DynamicIndexedLayer, _Growing):
    """A layer that holds all tokens, and the keys of an indexer."""

    indexer_keys: Any
    pools: Any = None  # rows that stand for several keys, which their indexer makes
    rate = 0  # of pools
    is_padded: bool | None = None  # whether any row has had padding, as their indexer notes

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not _in_place():
            return super().update_indexer(indexer_key_states)
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        (self.indexer_keys,) = _joined((self.indexer_keys,), (indexer_key_states,))
        return self.indexer_keys

    def indexer_slots(self, new: Tensor) -> Tensor | None:
        """The keys that are held with room for new ones [B, T, D] behind them; None where there is none."""
        return _slots(self.indexer_keys, new)

    def indexer_slots_of(self, columns: Sequence[Tensor]) -> Tensor | None:
        """The slots for new keys that consist of these columns, which are written there."""
        batch, tokens, _ = columns[0].shape
        width = sum(part.shape[2] for part in columns)
        slots = self.indexer_slots(columns[0].new_empty(1).expand(batch, tokens, width))
        if slots is not None:
            torch.cat(list(columns), -1, out=slots.narrow(1, slots.shape[1] - tokens, tokens))
        return slots

    def take_indexer(self, keys: Tensor) -> Tensor:
        """Takes the slots, whose last tokens have been written."""
        self.indexer_keys = keys
        return keys

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        """[B, count, D], a row for each `rate` keys: pool(first, count) makes those that are not held."""
        held = self.pools
        before = 0 if held is None else held.shape[1]
        if before < count:
            new = pool(before, count)
            (self.pools,) = _joined((new.new_empty(0) if held is None else held,), (new,))
            self.rate = rate
        pools: Tensor = self.pools
        return pools

    def crop(self, tokens_to_remove: int) -> None:
        indexer_keys, pools = self.indexer_keys, self.pools
        super().crop(tokens_to_remove)
        self.indexer_keys = _in_memory_of(indexer_keys, self.indexer_keys)
        if pools is not None:
            self.pools = _in_memory_of(pools, pools[:, : self.indexer_keys.shape[1] // self.rate])

    def reset(self) -> None:
        super().reset()
        self.pools, self.is_padded = None, None

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.pools = None  # which are made again


class _GrowingBlocks(_Growing):
    """A layer that holds all tokens, and the keys by which an indexer chooses blocks (MiniMax M3)."""

    idx_keys: Any

    def update_index(self, idx_k: Tensor) -> Tensor:
        if not _in_place():
            keys: Tensor = self.plain.update_index(self, idx_k)
            return keys
        held = idx_k.new_empty(0) if self.idx_keys is None else self.idx_keys
        (self.idx_keys,) = _joined((held,), (idx_k,))
        return self.idx_keys

    def indexed(self) -> int:
        """How many keys it holds."""
        return 0 if self.idx_keys is None else self.idx_keys.shape[2]

    def index_slots(self, new: Tensor) -> Tensor | None:
        """The keys that are held, [B, S + T, D], with room for new ones [B, T, D]; None without it."""
        found = _slots(self.idx_keys, new.unsqueeze(1))
        return None if found is None else found.squeeze(1)

    def take_index(self, keys: Tensor) -> Tensor:
        """Takes the slots, whose last tokens have been written."""
        held = self.idx_keys
        # unsqueeze would give the one head a stride that is not the memory's, and no program takes that.
        self.idx_keys = _shown(getattr(held, MEMORY), _start(held), keys.shape[1])
        return keys


class _GrowingWindow(_Growing, DynamicSlidingWindowLayer):
    """A layer that holds a sliding window, which moves on in its memory."""

    holds_latents = False

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        window = self.sliding_window
        self.cumulative_length += tokens
        if self.record_past:
            self.keys, self.values = keys, values
            visible = window - 1 + tokens
            return _from(-visible, keys), _from(-visible, values)
        self.keys, self.values = _from(-window + 1, keys), _from(-window + 1, values)
        if self._is_prompt(tokens):  # as views they would keep the memory of the whole prompt
            room = room_behind_window(window)
            self.keys, self.values = _copied(self.keys, room), _copied(self.values, room)
        return keys, values

    def _room(self, tokens: int) -> int:
        return 0 if self._is_prompt(tokens) else room_behind_window(self.sliding_window)

    def _is_prompt(self, tokens: int) -> bool:
        return tokens > room_behind_window(self.sliding_window) and not self.record_past


class _GrowingCompressed(_GrowingWindow):
    """A layer that holds a window of keys, which are the values, too, and compressed ones (DeepSeek-V4).

    What the last tokens have, of which entries are made, is in `pools` while the operator makes them, and in
    the buffers of transformers' class while that does: each starts from what the other has left.
    """

    compress_rate: int
    compressed_kv: dict[str, Any]
    entry_count: dict[str, int]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not _in_place():
            updated: tuple[Tensor, Tensor] = self.plain.update(self, key_states, value_states)
            return updated
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self.bits is not None:
                warnings.warn("torch_moe_mps: kv_bits=8 leaves compressed keys as they are", stacklevel=2)
        tokens = key_states.shape[-2]
        (keys,) = _joined((self.keys,), (key_states,), self._room(tokens))
        return self.take(keys, keys, tokens)

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        seen = super().take(keys, keys, tokens)
        self.values = self.keys
        return seen

    def slots(self, new: Tensor) -> Tensor | None:
        """The keys that are held, [B, 1, S + T, D], with room for new ones [B, 1, T, D]; None without it."""
        return _slots(self.keys, new)

    def pooled(self, name: str, kv: Tensor, width: int, position_bias: Tensor) -> Pooled:
        """The memory for what new tokens have, kv [B, T, W], which `update` has counted already.

        From then on the layer holds the entries that they complete, [B, N, width].
        """
        if name not in self.pools:  # transformers' class keeps sums with it
            self.biases[name] = position_bias.detach()
        tokens, closed = kv.shape[1], self.cumulative_length // self.compress_rate
        if name in self.pools and not _may_write(self.pools[name], kv):
            self._leave(tokens)
        state = self.pools.get(name)
        if state is None:
            state = self._state_of_buffers(name, kv, width, self.cumulative_length - tokens)
        held = self.compressed_kv[name]
        memory: Any = getattr(held, MEMORY, None)
        if memory is None or not _may_write(memory, kv) or closed > memory.shape[1]:
            memory = kv.new_empty(kv.shape[0], closed + room_behind(closed), width)
            if held is not None:
                memory[:, : held.shape[1]] = held
        self.pools[name] = state
        self.compressed_kv[name] = _view(memory, 0, closed)
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

    def _leave(self, tokens: int = 0) -> None:
        """Leaves what transformers' class holds in front of the last `tokens` that `update` has counted."""
        rate, position = self.compress_rate, self.cumulative_length - tokens
        for name, state in self.pools.items():
            rows, columns = state.shape[1], state.shape[3]
            held = self.compressed_kv[name].shape[2]
            places = torch.arange(position // rate * rate, position, device=state.device) % rows
            self.buffer_kv[name], self.buffer_gate[name] = state[:, places].unbind(2)
            if columns > held and position >= rate:
                places = torch.arange(position // rate * rate - rate, position // rate * rate) % rows
                before, gate = state[:, places.to(state.device), :, :held].unbind(2)
                self.overlap_kv[name], self.overlap_gate[name] = before, gate + self.biases[name][:, :held]
        self._forget()

    def _forget(self) -> None:
        for name in (_POOLS, _BIASES):
            self.__dict__.pop(name, None)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        self._leave(kv.shape[1])
        found: tuple[Tensor, Tensor, int] = self.plain.store_compression_weights(self, name, kv, gate)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._leave()
        made, arguments, state = super().__reduce_ex__(protocol)
        for name, value in state.items():
            if type(value) is dict:
                state[name] = {each: _compact(held) for each, held in value.items()}
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

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.values = self.keys
        for place, held in self.__dict__.items():
            for name, tensor in held.items() if type(held) is dict and place != _BIASES else ():
                if isinstance(tensor, Tensor):
                    held[name] = _with_room(tensor, change)


def _may_write(held: Tensor, new: Tensor) -> bool:
    """Whether something of new tokens may be written there. torch refuses some tensors of inference mode."""
    same = held.shape[0] == new.shape[0] and held.dtype is new.dtype and held.device == new.device
    return same and (torch.is_inference_mode_enabled() or not held.is_inference())


def latents_together(keys: Any, values: Any) -> Tensor | None:
    """[B, 1, S, L + R], whose first and last columns the two are; None if they do not lie side by side."""
    memory = _memory_of((keys, values))
    return None if memory is None else _shown(memory, _start(keys), keys.shape[2])


def _are_latents(keys: Tensor, values: Tensor) -> bool:
    """Whether keys and values are one head each, of widths that lie side by side without loss of speed."""
    widths = keys.shape[-1], values.shape[-1]
    return (
        keys.dim() == 4
        and keys.shape[1] == 1
        and keys.shape[:3] == values.shape[:3]
        and widths[0] != widths[1]
        and all(width % 8 == 0 for width in widths)
        and keys.dtype == values.dtype
        and keys.device == values.device
    )


def _joined(
    held: Sequence[Tensor], new: Sequence[Tensor], room: int | None = None, quantized: bool = False
) -> Sequence[Tensor]:
    """`held` followed by `new` along the tokens, which are the last dimension but one.

    Several tensors share one memory, in which they lie side by side. If there is room behind `held` that
    nobody uses, only `new` is written; else both are copied to memory with `room` for more tokens, or room
    for a share of them.
    """
    is_first = held[0].dim() == 1  # what transformers starts with
    if not all(type(part) in PLAIN for part in new) or not (is_first or all(map(_alike, held, new))):
        return [torch.cat(parts, dim=-2) for parts in zip(held, new, strict=True)]
    tokens, before = new[0].shape[-2], 0 if is_first else held[0].shape[-2]
    widths = [part.shape[-1] for part in new]
    memory = _memory_of(held)
    if (
        memory is None
        or isinstance(memory, QuantizedStates) != quantized
        or not _has_room(held, memory, tokens)
    ):
        if room is None:
            room = room_behind(before + tokens)
        start, capacity = 0, before + tokens + room
        if quantized:
            memory = QuantizedStates.empty(new[0], capacity, widths)
        else:
            memory = new[0].new_empty((*new[0].shape[:-2], capacity, sum(widths)))
        if before:
            _write(memory, 0, held, widths)
    else:
        start = _start(held[0])
    _write(memory, start + before, new, widths)
    return _columns(_view(memory, start, before + tokens), widths)


def _slots(held: Any, new: Tensor) -> Tensor | None:
    """What is held, and the room for new tokens behind it; None where there is none."""
    memory: Any = getattr(held, MEMORY, None)
    if memory is None or not _in_place() or not _alike(held, new):
        return None
    tokens = new.shape[-2]
    if not _has_room((held,), memory, tokens):
        return None
    return _view(memory, _start(held), held.shape[-2] + tokens)


def _memory_of(held: Sequence[Tensor]) -> Tensor | None:
    """The memory that is filled by these tensors, side by side; None if they have none, or not the same."""
    memory: Tensor | None = getattr(held[0], MEMORY, None)
    width = 0
    for part in held:
        if memory is None or getattr(part, MEMORY, None) is not memory:
            return None
        width += part.shape[-1]
    return memory if memory is not None and memory.shape[-1] == width else None


def _columns(states: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """Neighbouring columns of these widths, which know the memory of all."""
    if len(widths) == 1:
        return (states,)
    parts = states.columns(widths) if isinstance(states, QuantizedStates) else states.split(widths, -1)
    return [_in_memory_of(states, part) for part in parts]


def _write(memory: Tensor, start: int, states: Sequence[Tensor], widths: Sequence[int]) -> None:
    if len(states) > 1 and type(memory) in PLAIN and all(part.dtype is memory.dtype for part in states):
        torch.cat(list(states), -1, out=memory.narrow(-2, start, states[0].shape[-2]))  # in one launch
        return
    for columns, part in zip(_columns(memory, widths), states, strict=True):
        if isinstance(columns, QuantizedStates):
            columns.write(start, part)
        else:
            columns.narrow(-2, start, part.shape[-2]).copy_(part)


def _alike(held: Tensor, new: Tensor) -> bool:
    return (
        held.dtype == new.dtype
        and held.device == new.device
        and held.shape[:-2] == new.shape[:-2]
        and held.shape[-1] == new.shape[-1]
    )


def _has_room(held: Sequence[Tensor], memory: Tensor, tokens: int) -> bool:
    """Whether so many tokens may be written behind `held`.

    Another cache may hold the same tensor and have written there, and a tensor taken before a crop shows it:
    then `held` ends before what was written. It may be written again once nothing else lies in the memory.
    """
    stored = memory.packed if isinstance(memory, QuantizedStates) else memory
    if stored.is_inference() and not torch.is_inference_mode_enabled():  # which torch forbids
        return False
    end = _start(held[0]) + held[0].shape[-2]
    if end + tokens > memory.shape[-2]:
        return False
    if end == getattr(memory, END):
        return True
    storage = stored.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == len((memory, *held, storage))


def _copied(states: Tensor, room: int) -> Tensor:
    """A copy with room for `room` more tokens."""
    tokens = states.shape[-2]
    memory = _changed(states, lambda part: part.new_empty((*part.shape[:-2], tokens + room, part.shape[-1])))
    _write(memory, 0, (states,), (states.shape[-1],))
    return _view(memory, 0, tokens)


def _view(memory: Tensor, start: int, tokens: int) -> Tensor:
    """The last tokens that are written into a memory."""
    setattr(memory, END, start + tokens)
    return _shown(memory, start, tokens)


def _shown(memory: Tensor, start: int, tokens: int) -> Tensor:
    if isinstance(memory, QuantizedStates):
        view: Tensor = memory.tokens(start, tokens)
    else:
        view = memory.narrow(-2, start, tokens)
    setattr(view, MEMORY, memory)
    return view


def _start(view: Tensor) -> int:
    """The token of its memory that a view begins with."""
    stored = view.packed if isinstance(view, QuantizedStates) else view
    return stored.storage_offset() // stored.stride(-2)


def _from(token: int, states: Tensor) -> Tensor:
    """A view of the tokens from `token` on; a negative number counts from the end."""
    if not isinstance(states, QuantizedStates):
        return _in_memory_of(states, states[:, :, token:])
    begin, end, _ = slice(token, None).indices(states.shape[2])
    return _in_memory_of(states, states.tokens(begin, end - begin))


def _in_memory_of(tensor: Any, part: Any) -> Any:
    """`part`, a view of `tensor`, with the room behind it."""
    memory = getattr(tensor, MEMORY, None)
    if memory is not None and part is not None:
        setattr(part, MEMORY, memory)
    return part


def _with_room(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `change` to a tensor and to the room behind it."""
    memory: Tensor | None = getattr(tensor, MEMORY, None)
    if memory is None:
        return _changed(tensor, change)
    return _view(_changed(memory, change), _start(tensor), tensor.shape[-2])


def _changed(states: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return states.map(change) if isinstance(states, QuantizedStates) else change(states)


def _compact(value: Any) -> Any:
    """What is saved of a value: a view is saved without the rest of its memory."""
    return value.clone(memory_format=torch.contiguous_format) if hasattr(value, MEMORY) else value
