"""Buffers: preallocated tokens that the tensors of a cache are views of."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .quantized_states import PLAIN, QuantizedStates

BUFFER = "_moe_mps_buffer"  # the attribute of a view that names its buffer
# The buffer of a view, without a call of Python; AttributeError for any other value.
shown_buffer = attrgetter(BUFFER)


class Buffer:
    """Preallocated tokens of one tensor, or of several whose columns lie side by side.

    Several caches may hold views of a buffer, so that each view has its own start and length.

    Attributes:
        tensor: [B, ..., capacity, D], dense or in 8 bits.
        end: index after the last written token.
        rows: the tensor with spare rows whose first ones are `tensor`; `tensor` itself without spare rows.
    """

    __slots__ = ("end", "rows", "tensor")

    def __init__(self, tensor: Any, end: Any = 0, rows: Any = None):
        self.tensor, self.end = tensor, end
        self.rows = tensor if rows is None else rows

    @classmethod
    def empty(cls, like: Tensor, capacity: int, widths: Sequence[int], quantized: bool = False) -> "Buffer":
        """An uninitialised buffer for tensors of these widths, `like` [B, ..., T, D] among them."""
        if quantized:
            return cls(QuantizedStates.empty(like, capacity, widths))
        return cls(like.new_empty((*like.shape[:-2], capacity, sum(widths))))

    @property
    def capacity(self) -> Any:
        """Number of tokens it can hold; a symbol while a token is captured."""
        return self.tensor.shape[-2]

    @property
    def storage(self) -> Tensor:
        """The tensor that has the storage of the tokens, of several that they consist of."""
        return self.tensor.packed if isinstance(self.tensor, QuantizedStates) else self.tensor

    def part(self, start: Any, length: Any) -> Any:
        """A view of some tokens."""
        if isinstance(self.tensor, QuantizedStates):
            return self.attach(self.tensor.tokens(start, length))
        return self.attach(self.tensor.narrow(-2, start, length))

    def view(self, start: Any, length: Any) -> Any:
        """A view of some tokens; from now on the buffer is written up to its end."""
        self.end = start + length
        return self.part(start, length)

    def attach(self, view: Any) -> Any:
        """A view of the buffer's tensor, which knows the buffer from now on."""
        setattr(view, BUFFER, self)
        return view

    def append(self, start: Any, length: Any, new: Sequence[Tensor]) -> Any:
        """A view of some tokens and of new ones, which are written behind them."""
        self.write(start + length, new)
        return self.view(start, length + new[0].shape[-2])

    def write(self, start: Any, states: Sequence[Tensor]) -> None:
        """Writes the tokens of tensors side by side, from `start` on."""
        widths = [part.shape[-1] for part in states]
        if len(states) > 1 and self._is_plain(states):
            tokens = self.tensor.narrow(-2, start, states[0].shape[-2])
            torch.cat(list(states), -1, out=tokens)  # in one dispatch
            return
        for columns, part in zip(columns_of(self.tensor, widths), states, strict=True):
            if isinstance(columns, QuantizedStates):
                columns.write(start, part)
            else:
                columns.narrow(-2, start, part.shape[-2]).copy_(part)

    def _is_plain(self, states: Sequence[Tensor]) -> bool:
        return type(self.tensor) in PLAIN and all(part.dtype is self.tensor.dtype for part in states)

    def has_capacity(self, view: Any, tokens: int, *others: Any) -> bool:
        """True if so many tokens may be written behind a view, which the others lie beside.

        Another cache may hold the same tensor and have written there, and a tensor taken before a crop shows
        it: then the view ends before the last written token. It may be written again once nothing else is a
        view of the buffer.
        """
        if self.storage.is_inference() and not torch.is_inference_mode_enabled():  # torch forbids to write it
            return False
        end = start_of(view) + view.shape[-2]
        if end + tokens > self.capacity:
            return False
        return end == self.end or (COUNTS_HOLDERS and _lies_alone(self.storage, (self.tensor, view, *others)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Buffer":
        """A buffer of the changed tensor."""
        return Buffer(changed(self.tensor, change))


def buffer_of(view: Any) -> Buffer | None:
    """The buffer that a tensor is a view of; None for any other value."""
    return getattr(view, BUFFER, None)


def start_of(view: Any) -> Any:
    """The token of its buffer that a view begins with."""
    stored = view.packed if isinstance(view, QuantizedStates) else view
    return stored.storage_offset() // stored.stride(-2)


def column_of(view: Tensor) -> Any:
    """The column of its buffer that a view begins with."""
    offset = view.storage_offset()
    return offset % view.stride(-2) if offset else 0


def columns_of(states: Any, widths: Sequence[int]) -> Sequence[Any]:
    """Neighbouring columns of these widths, which know the buffer of all."""
    if len(widths) == 1:
        return (states,)
    parts = states.columns(widths) if isinstance(states, QuantizedStates) else states.split(widths, -1)
    return [in_buffer_of(states, part) for part in parts]


def in_buffer_of(tensor: Any, part: Any) -> Any:
    """`part`, a view of `tensor`, as a view of its buffer."""
    buffer = buffer_of(tensor)
    return part if buffer is None or part is None else buffer.attach(part)


def changed(states: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Tensor, or states in 8 bits, with each of its tensors changed."""
    return states.map(change) if isinstance(states, QuantizedStates) else change(states)


def _lies_alone(stored: Tensor, holders: Sequence[Any]) -> bool:
    """True if nothing but these holds the storage of a tensor, which is one of theirs."""
    storage = stored.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == len((*holders, storage))


def counts_holders() -> bool:
    """True if torch counts the holders of a storage as `_lies_alone` needs it; if not, all is copied."""
    try:
        memory = torch.empty(2, 4, device="cpu")
        view, others = memory.narrow(0, 0, 1), [memory.narrow(0, 1, 1), memory.detach()]
        alone = [_lies_alone(memory, (memory, view))]
        while others:
            others.pop()
            alone.append(_lies_alone(memory, (memory, view)))
    except Exception:  # it is torch's own
        return False
    return alone == [False, False, True]


COUNTS_HOLDERS = counts_holders()
