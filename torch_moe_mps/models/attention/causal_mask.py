"""Masks of order, with or without a window, that take no memory until something reads them."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...ops.families.attention import seen_in_order
from ..basics.tensors import NO_END, Deferred, notes_in, notes_on
from .mask_functions import order_of, window_of_last

_ATEN = torch.ops.aten
_OF_EVERYTHING = (_ATEN.detach.default, _ATEN.alias.default)
AND = (_ATEN.bitwise_and.Tensor, _ATEN.__and__.Tensor)
_TOKENS = -2  # the dimension
_INTEGERS = (int, torch.SymInt)  # a symbol while a token is captured


class CausalMask(Deferred):
    """[B, 1, T, S], for attention of T new tokens to S keys; each sees its own key and what lies before it.
    Indexers get [B, T, S].

    Bool, or 0 where a token sees a key and the lowest number of its dtype elsewhere. Whatever uses it gets
    these elements, made once. Tokens can be chosen without that, by slices.

    The rows of a batch may be padded on the left and on the right: each has a range of keys.

    Attributes:
        seen: the number of keys up to the last token's own; T to S.
        window: the largest number of keys that a token sees, itself included, or None.
        key_range: what the operator `cached_attention` takes, int32 [B, 2]; None where no key is padding.
        lookahead: how many keys after its own a token sees, too, as encoders' do, whose tokens are all keys.
    """

    seen: int
    window: int | None
    lookahead: int
    key_range: Tensor | None
    _elements: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        seen: int,
        window: int | None,
        dtype: torch.dtype,
        device: Any,
        key_range: Tensor | None = None,
        lookahead: int = 0,
    ) -> "CausalMask":
        order = {"seen": seen, "window": window, "lookahead": lookahead, "key_range": key_range}
        return cls.made(shape, dtype, device, **order, _elements=None)

    @classmethod
    def of(
        cls,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        **asked: Any,
    ) -> "CausalMask | None":
        """The mask that transformers asks its AttentionMaskInterface for, if it is one of these.

        Masks with padding between tokens, of packed sequences, or with a model's own pattern are not; nor is
        any while a graph is traced.
        """
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return None
        if any(type(size) not in _INTEGERS for size in (batch_size, q_length, kv_length, kv_offset)):
            return None
        is_known = notes_in(attention_mask).key_range is not None
        if not (_has_numbers(q_offset) and (is_known or _has_numbers(attention_mask))):
            return None
        before: Any = int(q_offset) if isinstance(q_offset, Tensor) else q_offset
        seen = before - kv_offset + q_length
        if not q_length <= seen <= kv_length:
            return None
        order = _order(asked, before, q_length, kv_offset, kv_length)
        if order is None or (order[1] > 0 and seen != kv_length):
            return None
        device = asked.get("device", "cpu")
        shown = _range_of(attention_mask, batch_size, kv_offset, seen, device, asked.get("config"))
        if shown is None:
            return None
        shape, (window, lookahead) = (batch_size, 1, q_length, kv_length), order
        return cls(shape, seen, window, asked["dtype"], device, *shown, lookahead)

    @property
    def hides_nothing(self) -> bool:
        tokens, keys = self.shape[_TOKENS:]
        first_sees_all = self.seen - tokens + self.lookahead >= keys - 1
        return first_sees_all and not self.has_window and self.key_range is None

    @property
    def is_of_first_tokens(self) -> bool:
        """True if the tokens are the first of the keys, and a window has not begun to move."""
        of_first = self.seen == self.shape[_TOKENS] and self.lookahead == 0
        return of_first and not self.has_window and self.key_range is None

    @property
    def has_window(self) -> bool:
        return self.window is not None and self.window < self.seen

    def elements(self) -> Tensor:
        if self._elements is None:
            tokens, keys = self.shape[_TOKENS:]
            sees = seen_in_order(
                tokens, keys, self.seen, self.window, self.key_range, self.device, self.lookahead
            )
            mask = sees if self.dtype == torch.bool else additive(sees, self.dtype)
            self._elements = (mask if len(self.shape) == 4 else mask.squeeze(1)).expand(self.shape)
        return self._elements

    def of_one(self, keys: int) -> "CausalMask":
        """The mask of the same tokens of one row that has so many keys and no padding."""
        return CausalMask((1, *self.shape[1:-1], keys), keys, self.window, self.dtype, self.device)

    def _of_tokens(self, start: int, stop: int) -> "CausalMask":
        *rows, tokens, keys = self.shape
        return self._shaped((*rows, stop - start, keys), self.seen - (tokens - stop))

    def _shaped(self, shape: tuple[int, ...], seen: int) -> "CausalMask":
        return CausalMask(shape, seen, self.window, self.dtype, self.device, self.key_range, self.lookahead)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        order = f"seen={self.seen}, window={self.window}, lookahead={self.lookahead}"
        padded = "" if self.key_range is None else ", padded"
        return f"CausalMask({tuple(self.shape)}, {order}, {self.dtype}{padded})"

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _OF_EVERYTHING:
            return args[0]._of_tokens(0, args[0].shape[_TOKENS])
        if func in AND and args[0] is args[1]:
            return args[0]
        if func is _ATEN.slice.Tensor and (chosen := _slice(*args, **kwargs)) is not None:
            return chosen
        if func is _ATEN.select.int and args[0].dim() == 4 and args[1] == 1:
            batch, _, *rest = args[0].shape
            return args[0]._shaped((batch, *rest), args[0].seen)
        return NotImplemented


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of bool in the form that is added to scores."""
    return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)


def _has_numbers(value: Any) -> bool:
    """False for a tensor that another class, or no memory, stands for."""
    return not isinstance(value, Tensor) or (type(value) is Tensor and not value.is_meta)


def _order(
    asked: dict[str, Any], before: int, tokens: int, first: int, keys: int
) -> tuple[int | None, int] | None:
    """(window, lookahead) of a mask of tokens behind `before` others, over keys from `first` on.

    None if it is more than an order.
    """
    size = asked.get("local_size")
    if asked.get("allow_is_causal_skip", True):
        return (size, 0) if size is None or _has_window(asked.get("config"), size) else None
    function: Any = asked.get("mask_function")
    # A compiled step, which is of one token, takes no mask of this class: its keys go beyond the token.
    if tokens == 1:
        window = window_of_last(function) if before + 1 == first + keys else None
        return None if window is None else (*window, 0)
    if all(type(number) is int for number in (before, tokens, first, keys)):
        return order_of(function, range(before, before + tokens), range(first, first + keys))
    return None


def _has_window(config: Any, size: int) -> bool:
    """True if a local mask of this size is a model's sliding window, not one of chunks."""
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return not chunked and size == getattr(config, "sliding_window", None)


def _range_of(
    mask: Tensor | None, rows: int, first: int, keys: int, device: Any, config: Any
) -> tuple[Tensor | None] | None:
    """Result of `range_of_padding` for some keys of a mask, from the first one on, and of so many rows."""
    if mask is None:
        return (None,)
    if mask.shape[0] != rows:
        return None
    known = notes_in(mask).key_range
    if known is None:
        return range_of_padding(mask[:, first : first + keys], keys, device, config)
    if mask.shape[1] != first + keys:
        return None
    (every,) = known
    return known if every is None or first == 0 else ((every - first).clamp(min=0),)


def follow_mask(before: Any, longer: Any, owner: Any) -> None:
    """Copies the range of keys to the next step's mask; new tokens are visible.

    So the CPU waits once for a mask on the GPU, not for each token of `generate`.

    Args:
        before, longer: masks of padding, or other arguments in their place.
        owner: as in `range_of_padding`.
    """
    if not (type(before) is type(longer) is Tensor and before.dim() == longer.dim() == 2):
        return
    known = notes_in(before).key_range
    if known is None:
        ranges = key_ranges(before.bool().cpu(), before.shape[1])
        if ranges is None or any(end != NO_END for _, end in ranges):
            return
        known = (_padding(ranges, before.device, owner),)
    notes_on(longer).key_range = known


def padding_of(mask: Any, owner: Any) -> tuple[Tensor | None] | None:
    """`range_of_padding` of the mask of a call, which is read once; None for a call without a 2D mask."""
    if type(mask) is not Tensor or mask.dim() != 2:
        return None
    return notes_in(mask).key_range or range_of_padding(mask, mask.shape[1], mask.device, owner)


def range_of_padding(mask: Tensor, keys: int, device: Any, owner: Any = None) -> tuple[Tensor | None] | None:
    """The key range that a 2D mask stands for, None in it where no key is padding; None for other masks.

    `owner`: a config or a model, as long as which its last ranges are held.
    """
    ranges = key_ranges(mask.bool().cpu(), keys)
    if ranges is None:
        return None
    return (_padding(ranges, device, owner),)


def _padding(ranges: tuple[tuple[int, int], ...], device: Any, owner: Any) -> Tensor | None:
    return None if not ranges or set(ranges) == {(0, NO_END)} else _on_device(ranges, device, owner)


def key_ranges(shown: Tensor, keys: int) -> tuple[tuple[int, int], ...] | None:
    """First key of each row of a 2D mask that is no padding, and the key after the last one.

    Keys after the mask are padding. None if there is padding between other keys.
    """
    first, count = shown.int().argmax(1, keepdim=True), shown.sum(1, keepdim=True)
    key = torch.arange(shown.shape[1], device=shown.device)
    if not torch.equal(shown, (key >= first) & (key < first + count)):
        return None
    ends = (first + count).flatten().tolist()
    return tuple((a, NO_END if b == keys else b) for a, b in zip(first.flatten().tolist(), ends, strict=True))


def _on_device(ranges: tuple[tuple[int, int], ...], device: Any, owner: Any) -> Tensor:
    """Copied once for all tokens of a `generate`: the CPU would wait for each copy to the GPU."""
    if owner is None:
        return _copied(ranges, device)
    if owner not in _copiers:
        _copiers[owner] = functools.lru_cache(maxsize=8)(_copied)
    return _copiers[owner](ranges, device)


def _copied(ranges: tuple[tuple[int, int], ...], device: Any) -> Tensor:
    return torch.tensor(ranges, dtype=torch.int32, device=device)


_copiers = WeakIdKeyDictionary()  # {owner: `_copied`, which remembers what it gave}


def _slice(
    mask: CausalMask, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> CausalMask | None:
    """A slice of the tokens, or of everything in another dimension."""
    size = mask.shape[dim]  # a symbol where it counts keys, which no range takes
    if step == 1 and not start and (stop is None or stop >= size):
        return mask._of_tokens(0, mask.shape[_TOKENS])
    of_tokens = dim % mask.dim() == mask.dim() + _TOKENS
    if step == 1 and of_tokens and mask.lookahead == 0:
        chosen = range(*slice(start, stop).indices(size))
        return mask._of_tokens(chosen.start, chosen.stop) if len(chosen) > 0 else None
    return None
