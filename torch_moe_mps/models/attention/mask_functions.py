"""Meaning of transformers' functions of masks, read without an element for each pair of a token and a key."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..graphs.nodes import arguments, aten, is_call, memory_of, written
from ..graphs.tracing import Recorder

# {what fills a new tensor: the argument that is its number}
_FILLED: dict[Any, str] = {aten.full: "fill_value", aten.fill: "value", aten.constant_pad_nd: "value"}
_COPIES = (aten.copy_, torch.ops.prims.copy_to)


class Box(NamedTuple):
    """Pairs of a token and a key: the token's position less the key's, and the key's, both inclusive."""

    lowest: float = -math.inf
    highest: float = math.inf
    first: float = -math.inf
    last: float = math.inf

    def within(self, other: "Box") -> bool:
        return (
            other.lowest <= self.lowest <= self.highest <= other.highest
            and other.first <= self.first <= self.last <= other.last
        )


def order_of(function: Callable, tokens: range, keys: range) -> tuple[int | None, int] | None:
    """(window, lookahead) of a mask by position alone, None for all others.

    Args:
        function: of (batch entry, head, position of a token, position of a key).
        tokens, keys: their positions.
    """
    seen = _seen_by(function, (tokens[0], tokens[-1]))
    if seen is None or seen.maybe or len(seen.boxes) != 1:
        return None
    (box,) = seen.boxes
    if box.first > keys[0] or box.last < keys[-1] or not -math.inf < box.lowest <= 0 <= box.highest:
        return None
    return None if box.highest == math.inf else int(box.highest) + 1, int(-box.lowest)


def window_of_last(function: Callable) -> tuple[int | None] | None:
    """(window,) of a mask for a token that is the last of its keys, (None,) if it sees all of them.

    None for a mask by more than positions. A mask that is joined to the order by "or" shows such a token no
    more.
    """
    seen, behind = _seen_by(function, (0, math.inf)), Box(lowest=0)
    if seen is None:
        return None
    seen &= _Seen(behind)
    if behind in seen.boxes:
        return (None,)
    if seen.maybe or len(seen.boxes) != 1:
        return None
    (box,) = seen.boxes
    return (int(box.highest) + 1,) if box == behind._replace(highest=box.highest) else None


def _seen_by(function: Callable, tokens: tuple[float, float]) -> "_Seen | None":
    """(query, key) pairs that a mask shows; None if it depends on more than positions.

    Args:
        tokens: the first and the last position of a token.
    """
    unread = _Unreadable()
    try:
        with _ElementsByPosition():
            result = function(unread, unread, _Position(tokens, 1, 0), _Position(tokens, 0, 1))
    except Exception:  # it is not ours: any error may come of it
        return None
    return result if type(result) is _Seen else None


class _ElementsByPosition(TorchFunctionMode):
    """Gives for an element of a tensor at a position the numbers that the tensor may hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and isinstance(args[1][0], _Unreadable):
            return _Element(_numbers_of(args[0]))
        return func(*args, **(kwargs or {}))


def _numbers_of(tensor: Tensor) -> set[float] | None:
    """The numbers that a tensor may hold which constants fill while a call is recorded; None for others."""
    modes = _get_current_dispatch_mode_stack()
    recorder = next((mode for mode in modes if isinstance(mode, Recorder)), None)
    return None if recorder is None else _numbers(recorder.node_of(tensor))


def _numbers(value: fx.Node) -> set[float] | None:
    """Numbers of all copies into a value count, wherever they go and whenever that is."""
    memory = memory_of(value)
    name = _FILLED.get(getattr(memory.target, "overloadpacket", None))
    filled = None if name is None else arguments(memory)[name]
    writes = [call for call in memory.graph.nodes if any(memory_of(it) is memory for it in written(call))]
    if not isinstance(filled, (int, float)) or not all(is_call(call, *_COPIES) for call in writes):
        return None
    sources: list[Any] = [call.args[1] for call in writes]
    sources += [memory.args[0]] if is_call(memory, aten.constant_pad_nd) else []
    found = [_numbers(source) for source in sources if memory_of(source) is not memory]
    return None if None in found else {filled}.union(*found)  # type: ignore[arg-type]  # none is None


class _Unreadable:
    """Nothing is told from it: any question raises."""

    def __bool__(self) -> NoReturn:
        raise TypeError

    __eq__ = __ne__ = lambda self, other: bool(self)
    __hash__ = None  # type: ignore[assignment]


class _Seen(_Unreadable):
    """Union of boxes of (query, key) pairs, and maybe further pairs; no box lies within another."""

    device = None

    def __init__(self, *boxes: Box, maybe: Iterable[Box] = ()) -> None:
        self.boxes = _largest(boxes)
        self.maybe = [box for box in _largest(maybe) if not any(map(box.within, self.boxes))]

    def __or__(self, other: "_Seen") -> "_Seen":
        return _Seen(*self.boxes, *other.boxes, maybe=[*self.maybe, *other.maybe])

    def __and__(self, other: "_Seen") -> "_Seen":
        maybe = _common([*self.boxes, *self.maybe], [*other.boxes, *other.maybe])
        return _Seen(*_common(self.boxes, other.boxes), maybe=maybe)

    def to(self, *_: Any) -> "_Seen":
        return self


def _largest(boxes: Iterable[Box]) -> list[Box]:
    """The boxes that are not empty, without those within others."""
    found: list[Box] = []
    for box in boxes:
        if box.lowest <= box.highest and box.first <= box.last and not any(map(box.within, found)):
            found = [*(other for other in found if not other.within(box)), box]
    return found


def _common(some: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    return [
        Box(max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3]))
        for a, b in itertools.product(some, others)
    ]


# {multiples of a token's and a key's position in a sum of 0 or less: the bound of a box, and its sign}
_BOUNDS = {(1, -1): ("highest", -1), (-1, 1): ("lowest", 1), (0, 1): ("last", -1), (0, -1): ("first", 1)}


class _Element(_Unreadable):
    """An element of a tensor, one of these numbers; None where they are not known."""

    def __init__(self, numbers: set[float] | None) -> None:
        self.numbers = numbers

    def __eq__(self, other: object) -> _Seen:  # type: ignore[override]  # tensors compare so
        return _Seen(maybe=[Box()])

    def __ge__(self, other: float) -> _Seen:
        is_below = self.numbers is not None and max(self.numbers) < other
        return _Seen(maybe=() if is_below else [Box()])


class _Position(_Unreadable):
    """`token` * the position of a token + `key` * the position of a key + `more`.

    `tokens`: the first and the last position of a token.
    """

    def __init__(self, tokens: tuple[float, float], token: int, key: int, more: float = 0) -> None:
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
        if less.key == 0 and all(less.token * end + less.more <= 0 for end in self.tokens):
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
