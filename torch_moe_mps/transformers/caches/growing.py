"""Memory that keys and values grow in: what a cache holds is a view of it, with room behind.

New tokens are written behind the last ones, and the view becomes longer. Where there is no room, or somebody
else has written there, all tokens are copied to new memory. Tensors that lie side by side, as those of latent
attention do, share one memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .quantized_states import PLAIN, QuantizedStates

# New memory has room for a sixteenth more: it stays small, and a token is copied 17 times at most.
SLOT_SHARE = 16
LEAST_SLOTS = 256  # tokens
# A window moves to new memory when it has moved on by an eighth of its length.
WINDOW_SLOT_SHARE = 8
LEAST_WINDOW_SLOTS = 64  # tokens
# The attribute of a view that names the memory it lies in, [..., capacity, D], and one of this memory: the
# token behind the last that was written.
MEMORY = "_moe_mps_memory"
END = "_moe_mps_end"


def free_slots_for(tokens: int) -> int:
    """For how many more tokens new memory has room that is made for `tokens` tokens."""
    return max(LEAST_SLOTS, tokens // SLOT_SHARE)


def window_slots(window: int) -> int:
    return max(LEAST_WINDOW_SLOTS, window // WINDOW_SLOT_SHARE)


def may_grow() -> bool:
    """Whether a cache may write into memory that earlier results lie in.

    With gradients on, a backward may still need these results; compilers have static caches instead.
    """
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def latents_together(keys: Any, values: Any) -> Tensor | None:
    """[B, 1, S, L + R], whose first and last columns the two are; None if they do not lie side by side."""
    memory = _memory_of((keys, values))
    return None if memory is None else part_of(memory, start_of(keys), keys.shape[2])


def are_latents(keys: Tensor, values: Tensor) -> bool:
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


def extended(
    held: Sequence[Tensor], new: Sequence[Tensor], room: int | None = None, quantized: bool = False
) -> Sequence[Tensor]:
    """`held` followed by `new` along the tokens, which are the last dimension but one.

    Several tensors share one memory, in which they lie side by side. If there is room behind `held` that
    nobody uses, only `new` is written; else both are copied to memory with `room` for more tokens, or room
    for a share of them.
    """
    if len(held) == 1 and not quantized and (longer := _written_behind(held[0], new[0])) is not None:
        return (longer,)
    is_first = held[0].dim() == 1  # transformers starts with such a tensor
    if not all(type(part) in PLAIN for part in new) or not (is_first or all(map(_alike, held, new))):
        return [torch.cat(parts, dim=-2) for parts in zip(held, new, strict=True)]
    tokens, before = new[0].shape[-2], 0 if is_first else held[0].shape[-2]
    widths = [part.shape[-1] for part in new]
    memory = _memory_of(held)
    if (
        memory is None
        or isinstance(memory, QuantizedStates) != quantized
        or not _has_slots(held, memory, tokens)
    ):
        room = free_slots_for(before + tokens) if room is None else room
        start, memory = 0, _larger(held if before else (), new[0], before + tokens + room, widths, quantized)
    else:
        start = start_of(held[0])
    _write(memory, start + before, new, widths)
    return columns_of(view_of(memory, start, before + tokens), widths)


def _larger(
    held: Sequence[Tensor], like: Tensor, capacity: int, widths: Sequence[int], quantized: bool
) -> Tensor:
    """New memory for so many tokens, which begins with those that are held."""
    if quantized:
        memory: Tensor = QuantizedStates.empty(like, capacity, widths)
    else:
        memory = like.new_empty((*like.shape[:-2], capacity, sum(widths)))
    if held:
        _write(memory, 0, held, widths)
    return memory


def _written_behind(held: Tensor, new: Tensor) -> Tensor | None:
    """`extended` for most tokens: one tensor, whose memory has room. None for all others."""
    memory: Any = getattr(held, MEMORY, None)
    if type(memory) not in PLAIN or type(new) not in PLAIN or memory.shape[-1] != held.shape[-1]:
        return None
    longer = slots_behind(held, new)
    if longer is not None:
        longer.narrow(-2, held.shape[-2], new.shape[-2]).copy_(new)
    return longer


def slots_behind(held: Any, new: Tensor) -> Tensor | None:
    """View of the held tokens and of the room for new ones behind them; None where there is none."""
    memory: Any = getattr(held, MEMORY, None)
    if memory is None or not may_grow() or not _alike(held, new):
        return None
    tokens = new.shape[-2]
    if not _has_slots((held,), memory, tokens):
        return None
    return view_of(memory, start_of(held), held.shape[-2] + tokens)


def _memory_of(held: Sequence[Tensor]) -> Tensor | None:
    """The memory that is filled by these tensors, side by side; None if they have none, or not the same."""
    memory: Tensor | None = getattr(held[0], MEMORY, None)
    width = 0
    for part in held:
        if memory is None or getattr(part, MEMORY, None) is not memory:
            return None
        width += part.shape[-1]
    return memory if memory is not None and memory.shape[-1] == width else None


def columns_of(states: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """Neighbouring columns of these widths, which know the memory of all."""
    if len(widths) == 1:
        return (states,)
    parts = states.columns(widths) if isinstance(states, QuantizedStates) else states.split(widths, -1)
    return [in_memory_of(states, part) for part in parts]


def _write(memory: Tensor, start: int, states: Sequence[Tensor], widths: Sequence[int]) -> None:
    if len(states) > 1 and type(memory) in PLAIN and all(part.dtype is memory.dtype for part in states):
        torch.cat(list(states), -1, out=memory.narrow(-2, start, states[0].shape[-2]))  # in one dispatch
        return
    for columns, part in zip(columns_of(memory, widths), states, strict=True):
        if isinstance(columns, QuantizedStates):
            columns.write(start, part)
        else:
            columns.narrow(-2, start, part.shape[-2]).copy_(part)


def _alike(held: Tensor, new: Tensor) -> bool:
    (*many, _, width), (*others, _, other) = held.shape, new.shape
    return held.dtype is new.dtype and width == other and many == others and held.device == new.device


def _has_slots(held: Sequence[Tensor], memory: Tensor, tokens: int) -> bool:
    """Whether so many tokens may be written behind `held`.

    Another cache may hold the same tensor and have written there, and a tensor taken before a crop shows it:
    then `held` ends before what was written. It may be written again once nothing else lies in the memory.
    """
    stored = memory.packed if isinstance(memory, QuantizedStates) else memory
    if stored.is_inference() and not torch.is_inference_mode_enabled():  # torch forbids to write it
        return False
    end = start_of(held[0]) + held[0].shape[-2]
    if end + tokens > memory.shape[-2]:
        return False
    if end == getattr(memory, END):
        return True
    return COUNTS_HOLDERS and _lies_alone(stored, (memory, *held))


def _lies_alone(stored: Tensor, holders: Sequence[Any]) -> bool:
    """Whether nothing but these holds the storage of a tensor, which is one of theirs."""
    storage = stored.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == len((*holders, storage))


def counts_holders() -> bool:
    """Whether torch counts the holders of a storage as `_lies_alone` needs it; if not, all is copied."""
    try:
        memory = torch.empty(2, 4, device="cpu")
        held, others = memory.narrow(0, 0, 1), [memory.narrow(0, 1, 1), memory.detach()]
        alone = [_lies_alone(memory, (memory, held))]
        while others:
            others.pop()
            alone.append(_lies_alone(memory, (memory, held)))
    except Exception:  # it is torch's own
        return False
    return alone == [False, False, True]


COUNTS_HOLDERS = counts_holders()


def copied(states: Tensor, room: int) -> Tensor:
    """A copy with room for `room` more tokens."""
    tokens = states.shape[-2]
    memory = changed(states, lambda part: part.new_empty((*part.shape[:-2], tokens + room, part.shape[-1])))
    _write(memory, 0, (states,), (states.shape[-1],))
    return view_of(memory, 0, tokens)


def view_of(memory: Tensor, start: int, tokens: int) -> Tensor:
    """A view of tokens; its last one is from now on the last one written in the buffer."""
    setattr(memory, END, start + tokens)
    return part_of(memory, start, tokens)


def part_of(memory: Tensor, start: int, tokens: int) -> Tensor:
    """A view of some tokens of a memory, which knows that memory."""
    if isinstance(memory, QuantizedStates):
        view: Tensor = memory.tokens(start, tokens)
    else:
        view = memory.narrow(-2, start, tokens)
    setattr(view, MEMORY, memory)
    return view


def start_of(view: Tensor) -> int:
    """The token of its memory that a view begins with."""
    stored = view.packed if isinstance(view, QuantizedStates) else view
    return stored.storage_offset() // stored.stride(-2)


def tokens_from(token: int, states: Tensor) -> Tensor:
    """A view of the tokens from `token` on; a negative number counts from the end."""
    if not isinstance(states, QuantizedStates):
        return in_memory_of(states, states[:, :, token:])
    begin, end, _ = slice(token, None).indices(states.shape[2])
    return in_memory_of(states, states.tokens(begin, end - begin))


def in_memory_of(tensor: Any, part: Any) -> Any:
    """`part`, a view of `tensor`, with the room behind it."""
    memory = getattr(tensor, MEMORY, None)
    if memory is not None and part is not None:
        setattr(part, MEMORY, memory)
    return part


def with_slots(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `change` to a tensor and to the room behind it."""
    memory: Tensor | None = getattr(tensor, MEMORY, None)
    if memory is None:
        return changed(tensor, change)
    return view_of(changed(memory, change), start_of(tensor), tensor.shape[-2])


def changed(states: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return states.map(change) if isinstance(states, QuantizedStates) else change(states)


def compact(value: Any) -> Any:
    """Value to save: a view is saved without the rest of its memory."""
    return value.clone(memory_format=torch.contiguous_format) if hasattr(value, MEMORY) else value
