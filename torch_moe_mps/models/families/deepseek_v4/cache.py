"""Layers of a cache that hold a window of keys, and compressed keys of all tokens."""

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...caches import growing
from ...caches.buffer import Buffer, buffer_of
from ...caches.declared import INDEX, SHARED, STATE, WINDOW, Batched, DeclaredLayer, Trim
from ...caches.held import HeldEntries
from ...caches.layers import GrowingWindow, LayerBase
from ...caches.state import OWN, LayerState

_HELD = DeclaredLayer(
    mappings={
        "compressed_kv": INDEX, "buffer_kv": INDEX, "buffer_gate": INDEX, "overlap_kv": INDEX,
        "overlap_gate": INDEX, "entry_count": None, "windows": STATE, "biases": SHARED,
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
    compresses = issubclass(plain, _Compresses) and not issubclass(plain, LayerBase)
    return GrowingCompressed if compresses else None


class GrowingCompressed(GrowingWindow, HeldEntries):
    """A layer that holds a window of keys, which are the values, too, and compressed ones.

    The operator that makes entries keeps the last tokens in `windows`; transformers' class has attributes of
    its own for them. Whichever runs starts from what the other has left.

    Attributes:
        compressed_kv: {name of a compressor: [B, N, D], its entries}.
        windows: {name: [B, rate or 2 rate, 2, W]}, the last tokens as `_pool_window_` keeps them.
        biases: {name: [rate, W]}, the position bias of each compressor that has a window.
    """

    declared = WINDOW.with_more(_HELD, batched=Batched.EACH)
    is_first = True
    is_croppable = False
    compress_rate: int
    compressed_kv: dict[str, Any]
    entry_count: dict[str, int]
    windows: Any = MappingProxyType({})
    biases: Any = MappingProxyType({})

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not growing.may_grow():
            return self.plain.update(self, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self.bits is not None:
                warnings.warn(
                    f"torch_moe_mps: kv_bits={self.bits!r} leaves compressed keys as they are", stacklevel=2
                )
        tokens = key_states.shape[-2]
        (keys,) = growing.extended((self.keys,), (key_states,), self._spare(tokens))
        return self.take(keys, keys, tokens)

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        seen = super().take(keys, keys, tokens)
        self.values = self.keys
        return seen

    def reserve(self, new: Tensor) -> Tensor | None:
        return growing.reserved(self.keys, new)

    def buffers_for(self, name: str, kv: Tensor, width: int, position_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors that `_pool_window_` updates in place for new tokens kv [B, T, W] that are counted already.

        Returns: the window, and the buffer of all entries [B, N, width], which shows the new ones.
        """
        tokens, closed = kv.shape[1], self.cumulative_length // self.compress_rate
        if name in self.windows and not _may_write(self.windows[name], kv):
            self._leave(name, tokens)
        window = self.windows.get(name)
        if window is None:
            if not self.windows:
                self.windows, self.biases = {}, {}
            self.biases[name] = position_bias.detach()  # transformers' class keeps sums with it
            window = self._window_of_buffers(name, kv, width, self.cumulative_length - tokens)
        entries = self.compressed_kv[name]
        buffer = buffer_of(entries)
        if buffer is None or not _may_write(buffer.tensor, kv) or closed > buffer.capacity:
            buffer = Buffer(kv.new_empty(kv.shape[0], closed + growing.spare_for(closed), width))
            if entries is not None:
                buffer.write(0, (entries,))
        self.windows[name] = window
        self.compressed_kv[name] = buffer.view(0, closed)
        self.entry_count[name] = closed
        return window, buffer.tensor

    def _window_of_buffers(self, name: str, kv: Tensor, width: int, position: int) -> Tensor:
        """The window that transformers' buffers describe, before `position` tokens."""
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
        if name not in self.windows:
            return
        state, bias = self.windows.pop(name), self.biases.pop(name)
        if not self.windows:
            self._forget()
        rate, position = self.compress_rate, self.cumulative_length - tokens
        rows, columns = state.shape[1], state.shape[3]
        width = self.compressed_kv[name].shape[2]
        places = torch.arange(position // rate * rate, position, device=state.device) % rows
        self.buffer_kv[name], self.buffer_gate[name] = state[:, places].unbind(2)
        if columns > width and position >= rate:
            places = torch.arange(position // rate * rate - rate, position // rate * rate) % rows
            before, gate = state[:, places.to(state.device), :, :width].unbind(2)
            self.overlap_kv[name], self.overlap_gate[name] = before, gate + bias[:, :width]

    def _forget(self) -> None:
        if type(self.windows) is dict:
            del self.windows, self.biases

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        self._leave(name, kv.shape[1])
        return self.plain.store_compression_weights(self, name, kv, gate)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        for name in [*self.windows]:
            self._leave(name)
        factory, arguments, state = super().__reduce_ex__(protocol)
        for name, value in state.items():
            if type(value) is dict:
                state[name] = {item: growing.compact(tensor) for item, tensor in value.items()}
        return factory, arguments, state

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: RuntimeError, for a window of tokens that is complete cannot be opened again."""
        if tokens_to_remove != 0:
            raise RuntimeError(
                "torch_moe_mps: a cache of compressed keys cannot be cropped: their tokens are not kept"
            )

    def reset(self) -> None:
        super().reset()
        self._forget()
        if not self.is_in_order:
            del self.is_in_order

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self.values = self.keys
        state = LayerState(self)
        tensors = state.tensors().items()
        of_sequences = {name: tensor for name, tensor in tensors if name.dictionary not in (OWN, "biases")}
        state.put({name: growing.with_spare(tensor, change) for name, tensor in of_sequences.items()})


def _may_write(buffer: Tensor, new: Tensor) -> bool:
    """True if something of new tokens may be written there. torch refuses some tensors of inference mode."""
    same = buffer.shape[0] == new.shape[0] and buffer.dtype is new.dtype and buffer.device == new.device
    return same and (torch.is_inference_mode_enabled() or not buffer.is_inference())
