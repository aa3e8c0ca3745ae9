"""Growth of keys and values: new tokens are written after the last ones, into their buffer's spare capacity.

Where there are none, or another cache has written there, all tokens are copied to a larger buffer. Tensors
that lie side by side, as in latent attention, share one buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .buffer import Buffer, buffer_of, changed, columns_of, in_buffer_of, start_of
from .quantized_states import PLAIN, QuantizedStates

# A new buffer has capacity for a sixteenth more: it stays small, and a token is copied 17 times at most.
SPARE_SHARE = 16
LEAST_SPARE = 256  # tokens
# A window moves to a new buffer when it has moved on by an eighth of its length.
WINDOW_SPARE_SHARE = 8
LEAST_WINDOW_SPARE = 64  # tokens


def spare_for(tokens: int) -> int:
    """Spare capacity of a new buffer for `tokens` tokens."""
    return max(LEAST_SPARE, tokens // SPARE_SHARE)


def window_spare(window: int) -> int:
    return max(LEAST_WINDOW_SPARE, window // WINDOW_SPARE_SHARE)


def may_grow() -> bool:
    """True if a cache may write into a buffer that earlier results lie in.

    With gradients on, a backward may still need these results; compilers have static caches instead.
    """
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def latents_together(keys: Any, values: Any) -> Tensor | None:
    """[B, 1, S, L + R], whose first and last columns the two are; None if they do not lie side by side."""
    buffer = _common_buffer((keys, values))
    return None if buffer is None else buffer.part(start_of(keys), keys.shape[2])


def are_latents(keys: Tensor, values: Tensor) -> bool:
    """True if keys and values are one head each, of widths that lie side by side without loss of speed."""
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
    cached: Sequence[Tensor], new: Sequence[Tensor], spare: int | None = None, quantized: bool = False
) -> Sequence[Tensor]:
    """`cached` followed by `new` along the tokens, which are the last dimension but one.

    Several tensors lie side by side in one buffer. Into spare capacity after `cached` only `new`
    is written; else both are copied to a buffer with room for `spare` more tokens, or for a
    share of the tokens.
    """
    if len(cached) == 1 and not quantized and (longer := _written_behind(cached[0], new[0])) is not None:
        return (longer,)
    is_first = _is_empty(cached[0])
    if not _may_lie_behind(cached, new):
        return [torch.cat(parts, dim=-2) for parts in zip(cached, new, strict=True)]
    tokens, before = new[0].shape[-2], 0 if is_first else cached[0].shape[-2]
    widths = [part.shape[-1] for part in new]
    buffer = _common_buffer(cached)
    if (
        buffer is None
        or isinstance(buffer.tensor, QuantizedStates) != quantized
        or not buffer.has_capacity(cached[0], tokens, *cached[1:])
    ):
        spare = spare_for(before + tokens) if spare is None else spare
        buffer, start = Buffer.empty(new[0], before + tokens + spare, widths, quantized), 0
        if before:
            buffer.write(0, cached)
    else:
        start = start_of(cached[0])
    return columns_of(buffer.append(start, before, new), widths)


def _is_empty(cached: Tensor) -> bool:
    """True for the tensor that transformers starts with."""
    return cached.dim() == 1


def _may_lie_behind(cached: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """True if new tokens may be written behind the held ones, into their buffer."""
    are_plain = all(type(part) in PLAIN for part in new)
    return are_plain and (_is_empty(cached[0]) or all(map(_alike, cached, new)))


def _written_behind(cached: Tensor, new: Tensor) -> Tensor | None:
    """`extended` for most tokens: one tensor, whose buffer has spare capacity. None for all others."""
    buffer = buffer_of(cached)
    if buffer is None or type(buffer.tensor) not in PLAIN or type(new) not in PLAIN:
        return None
    if buffer.tensor.shape[-1] != cached.shape[-1]:
        return None
    longer = reserved(cached, new)
    if longer is not None:
        longer.narrow(-2, cached.shape[-2], new.shape[-2]).copy_(new)
    return longer


def reserved(cached: Any, new: Tensor) -> Tensor | None:
    """View of the cached tokens and of the capacity reserved for `new` after them; None without capacity."""
    buffer = buffer_of(cached)
    if buffer is None or not may_grow() or not _alike(cached, new):
        return None
    tokens = new.shape[-2]
    if not buffer.has_capacity(cached, tokens):
        return None
    longer: Tensor = buffer.view(start_of(cached), cached.shape[-2] + tokens)
    return longer


def _common_buffer(cached: Sequence[Tensor]) -> Buffer | None:
    """The buffer that is filled by these tensors, side by side; None if they have none, or not the same."""
    buffer, width = buffer_of(cached[0]), 0
    for part in cached:
        if buffer is None or buffer_of(part) is not buffer:
            return None
        width += part.shape[-1]
    return buffer if buffer is not None and buffer.tensor.shape[-1] == width else None


def _alike(cached: Tensor, new: Tensor) -> bool:
    (*many, _, width), (*others, _, other) = cached.shape, new.shape
    return cached.dtype is new.dtype and width == other and many == others and cached.device == new.device


def copied(states: Tensor, spare: int) -> Tensor:
    """A copy with spare capacity for `spare` tokens."""
    tokens = states.shape[-2]
    shape = (*states.shape[:-2], tokens + spare)
    buffer = Buffer(changed(states, lambda part: part.new_empty((*shape, part.shape[-1]))))
    buffer.write(0, (states,))
    copy: Tensor = buffer.view(0, tokens)
    return copy


def tokens_from(token: int, states: Tensor) -> Tensor:
    """A view of the tokens from `token` on; a negative number counts from the end."""
    if not isinstance(states, QuantizedStates):
        return in_buffer_of(states, states[:, :, token:])
    begin, end, _ = slice(token, None).indices(states.shape[2])
    return in_buffer_of(states, states.tokens(begin, end - begin))


def with_spare(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor after `change`, which its buffer's spare capacity undergoes, too."""
    buffer = buffer_of(tensor)
    if buffer is None:
        return changed(tensor, change)
    return buffer.changed(change).view(start_of(tensor), tensor.shape[-2])


def compact(value: Any) -> Any:
    """Value to save: a view is saved without the rest of its buffer."""
    return value if buffer_of(value) is None else value.clone(memory_format=torch.contiguous_format)
