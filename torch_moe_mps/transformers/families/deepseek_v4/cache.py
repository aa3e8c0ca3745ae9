"""Layers of a cache that hold a window of keys, and compressed keys of all tokens."""

import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...caches import growing
from ...caches.declared import INDEX, SHARED, STATE, WINDOW, Batched, Declared, Trim
from ...caches.held import HeldEntries
from ...caches.layers import GrowingWindow, Made
from ...caches.state import OWN, LayerState

# Attributes of a layer of compressed keys.
_POOLS, _BIASES = "_moe_mps_pools", "_moe_mps_biases"
_HELD = Declared(
    mappings={
        "compressed_kv": INDEX, "buffer_kv": INDEX, "buffer_gate": INDEX, "overlap_kv": INDEX,
        "overlap_gate": INDEX, "entry_count": None, _POOLS: STATE, _BIASES: SHARED,
    },
    numbers=("compress_rate", "is_in_order"),
    trim=Trim.COPY,
)  # fmt: skip


@runtime_checkable
class _Compresses(Protocol):
    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]: ...


def growing_layer(plain: Any) -> type | None:
    """Class that grows in place for a class of layers that compresses keys."""
    compresses = issubclass(plain, _Compresses) and not issubclass(plain, Made)
    return GrowingCompressed if compresses else None


class GrowingCompressed(GrowingWindow, HeldEntries):
    """A layer that holds a window of keys, which are the values, too, and compressed ones.

    What the last tokens have, of which entries are made, is in `pools` while the operator makes them, and in
    the buffers of transformers' class while that does: each starts from what the other has left.

    Attributes:
        compressed_kv: {name of a compressor: [B, N, D], its entries}.
    """

    declared = WINDOW.with_more(_HELD, batched=Batched.EACH)
    is_first = True
    is_croppable = False
    compress_rate: int
    compressed_kv: dict[str, Any]
    entry_count: dict[str, int]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not growing.may_grow():
            return self.plain.update(self, key_states, value_states)
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

    def pooled(self, name: str, kv: Tensor, width: int, position_bias: Tensor) -> tuple[Tensor, Tensor]:
        """The memory for what new tokens have, kv [B, T, W], which `update` or `take` has counted already.

        Returns: what `_pool_window_` updates in place: the last tokens, and all entries with room for the new
            ones, which the layer holds from then on, [B, N, width].
        """
        tokens, closed = kv.shape[1], self.cumulative_length // self.compress_rate
        if name in self.pools and not _may_write(self.pools[name], kv):
            self._leave(name, tokens)
        state = self.pools.get(name)
        if state is None:
            self.biases[name] = position_bias.detach()  # transformers' class keeps sums with it
            state = self._state_of_buffers(name, kv, width, self.cumulative_length - tokens)
        held = self.compressed_kv[name]
        memory: Any = getattr(held, growing.MEMORY, None)
        if memory is None or not _may_write(memory, kv) or closed > memory.shape[1]:
            memory = kv.new_empty(kv.shape[0], closed + growing.free_slots_for(closed), width)
            if held is not None:
                memory[:, : held.shape[1]] = held
        self.pools[name] = state
        self.compressed_kv[name] = growing.view_of(memory, 0, closed)
        self.entry_count[name] = closed
        return state, memory

    @property
    def pools(self) -> dict[str, Tensor]:
        """{name: [B, rate or 2 rate, 2, W]}, the last tokens as `_pool_window_` keeps them."""
        return self.__dict__.setdefault(_POOLS, {})

    @property
    def biases(self) -> dict[str, Tensor]:
        """{name: [rate, W]}, the position bias of each compressor."""
        return self.__dict__.setdefault(_BIASES, {})

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
        return self.plain.store_compression_weights(self, name, kv, gate)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        for name in [*self.pools]:
            self._leave(name)
        made, arguments, state = super().__reduce_ex__(protocol)
        for name, value in state.items():
            if type(value) is dict:
                state[name] = {item: growing.compact(held) for item, held in value.items()}
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
        state = LayerState(self)
        tensors = state.tensors().items()
        held = {name: tensor for name, tensor in tensors if name.dictionary not in (OWN, _BIASES)}
        state.put({name: growing.with_slots(tensor, change) for name, tensor in held.items()})


def _may_write(held: Tensor, new: Tensor) -> bool:
    """Whether something of new tokens may be written there. torch refuses some tensors of inference mode."""
    same = held.shape[0] == new.shape[0] and held.dtype is new.dtype and held.device == new.device
    return same and (torch.is_inference_mode_enabled() or not held.is_inference())
