"""Meaning of transformers' functions of masks, read without an element for each pair of a token and a key."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..graphs.constants import numbers_of


class Box(NamedTuple):
    """Pairs of a token and a key: the token's position less the key's, and the key's, both inclusive."""

    least: float = -math.inf
    most: float = math.inf
    first: float = -math.inf
    last: float = math.inf

    def within(self, other: "Box") -> bool:
        return (
            other.least <= self.least <= self.most <= other.most
            and other.first <= self.first <= self.last <= other.last
        )


def order_of(function: Callable, tokens: range, keys: range) -> tuple[int | None, int] | None:
    """(window, lookahead) of a mask by position alone, None for all others.

    Args:
        function: of (batch entry, head, position of a token, position of a key).
        tokens, keys: their positions.
    """
    unread = _Unreadable()
    try:
        result = function(unread, unread, _Position(tokens, 1, 0), _Position(tokens, 0, 1))
    except Exception:  # it asks for what positions do not tell
        return None
    if type(result) is not _Seen or len(result.boxes) != 1:
        return None
    (box,) = result.boxes
    if box.first > keys[0] or box.last < keys[-1] or not -math.inf < box.least <= 0 <= box.most:
        return None
    return None if box.most == math.inf else int(box.most) + 1, int(-box.least)


def window_of_last(function: Any) -> tuple[int | None] | None:
    """(window,) of a mask for a token that is the last of its keys, (None,) if it sees all of them.

    What transformers joins to the order by "or" shows such a token no more. None for all other functions.
    """
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return (None,)
    code = getattr(function, "__code__", None)
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if code is masks.sliding_window_overlay(1).__code__:
        return (held["sliding_window"],)
    members = held.get("mask_functions", ())
    if code is masks.or_masks().__code__:
        windows = [window_of_last(member) for member in members if not _is_of_no_block(member)]
        return (None,) if (None,) in windows else windows[0] if len(windows) == 1 else None
    windows = [*map(window_of_last, members)]
    if code is not masks.and_masks().__code__ or None in windows:
        return None
    return (min((window[0] for window in windows if window and window[0]), default=None),)


def _is_of_no_block(function: Any) -> bool:
    """Whether a mask shows the keys of a token's block, and it is known that no token is in one."""
    from ..upstream.masks import blockwise_overlay

    blocks: Any = None
    if getattr(function, "__code__", None) is blockwise_overlay(blocks).__code__:
        blocks = numbers_of(inspect.getclosurevars(function).nonlocals["block_sequence_ids"])
    return blocks is not None and max(blocks) < 0


class _Unreadable:
    """Nothing is told from it: any question raises."""

    def __bool__(self) -> NoReturn:
        raise TypeError

    __eq__ = __ne__ = lambda self, other: bool(self)
    __hash__ = None  # type: ignore[assignment]


class _Seen(_Unreadable):
    """The pairs in any of some boxes, none within another."""

    device = None

    def __init__(self, *boxes: Box) -> None:
        self.boxes: list[Box] = []
        for box in boxes:
            if box.least <= box.most and box.first <= box.last and not any(map(box.within, self.boxes)):
                self.boxes = [*(other for other in self.boxes if not other.within(box)), box]

    def __or__(self, other: "_Seen") -> "_Seen":
        return _Seen(*self.boxes, *other.boxes)

    def __and__(self, other: "_Seen") -> "_Seen":
        pairs = [(a, b) for a in self.boxes for b in other.boxes]
        return _Seen(
            *(Box(max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])) for a, b in pairs)
        )

    def to(self, *_: Any) -> "_Seen":
        return self


# {multiples of a token's and a key's position in a sum that is 0 at most: the bound of a box, and its sign}
_BOUNDS = {(1, -1): ("most", -1), (-1, 1): ("least", 1), (0, 1): ("last", -1), (0, -1): ("first", 1)}


class _Position(_Unreadable):
    """`token` * the position of a token + `key` * the position of a key + `more`."""

    def __init__(self, tokens: range, token: int, key: int, more: float = 0) -> None:
        self.tokens, self.token, self.key, self.more = tokens, token, key, more

    def __add__(self, other: Any) -> "_Position":
        if isinstance(other, _Position):
            return _Position(
                self.tokens, self.token + other.token, self.key + other.key, self.more + other.more
            )
        if type(other) not in (int, float):
            raise TypeError
        return _Position(self.tokens, self.token, self.key, self.more + other)

    __radd__ = __add__

    def __neg__(self) -> "_Position":
        return _Position(self.tokens, -self.token, -self.key, -self.more)

    def __sub__(self, other: Any) -> "_Position":
        return self + -other

    def __rsub__(self, other: Any) -> "_Position":
        return -self + other

    def __abs__(self) -> "_Distance":
        return _Distance(self)

    def __le__(self, other: Any) -> _Seen:
        less = self - other
        if (less.token, less.key) == (0, 0):
            return _Seen(Box()) if less.more <= 0 else _Seen()
        if (less.token, less.key) in _BOUNDS:
            name, sign = _BOUNDS[less.token, less.key]
            return _Seen(Box(**{name: sign * less.more}))
        if less.key == 0 and all(
            less.token * end + less.more <= 0 for end in (self.tokens[0], self.tokens[-1])
        ):
            return _Seen(Box())
        raise TypeError

    def __lt__(self, other: Any) -> _Seen:
        return self + 1 <= other

    def __ge__(self, other: Any) -> _Seen:
        return -self <= -other

    def __gt__(self, other: Any) -> _Seen:
        return -self < -other

    def new_ones(self, *_: Any, **__: Any) -> _Seen:
        return _Seen(Box())

    def new_zeros(self, *_: Any, **__: Any) -> _Seen:
        return _Seen()


class _Distance(_Unreadable):
    def __init__(self, of: _Position) -> None:
        self.of = of

    def __le__(self, other: Any) -> _Seen:
        return (self.of <= other) & (self.of >= -other)

    def __lt__(self, other: Any) -> _Seen:
        return (self.of < other) & (self.of > -other)
