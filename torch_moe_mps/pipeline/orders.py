"""Orders of the first process to those that follow: what each does to the caches of its own layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from .peers import as_bytes, from_bytes

_TENSOR = "tensor"  # stands for a tensor in the text, with its number in the message


@dataclass
class CacheOrder:
    """One order; its fields are numbers, texts, lists of them, and tensors on the CPU."""

    kinds: ClassVar[dict[str, type["CacheOrder"]]] = {}

    def __init_subclass__(cls) -> None:
        CacheOrder.kinds[cls.__name__] = cls


@dataclass
class StartPrefill(CacheOrder):
    """A new prefill.

    Attributes:
        inputs: of the model.
        number: of the prefill.
        known: numbers of the prefills that still exist.
        held: numbers of the cached prefixes; None without a prefix cache.
        cached: how many tokens are cached in the first process.
        reads_whole: True if the prompt is read in one call.
    """

    inputs: dict[str, Tensor]
    number: int
    known: list[int]
    held: list[int] | None
    cached: int
    reads_whole: bool


@dataclass
class Chunk(CacheOrder):
    """The next chunk of a prefill, of so many tokens."""

    number: int
    tokens: int


@dataclass
class StepSingle(CacheOrder):
    """A step of one sequence that is not batched: tokens [T] of a prefill, from position `start` on."""

    ids: Tensor
    number: int
    start: int


@dataclass
class Step(CacheOrder):
    """A step of all rows, with their tokens [B * T]."""

    ids: Tensor


@dataclass
class NewRows(CacheOrder):
    """An empty batch; with `defers` its layers defer state updates."""

    defers: bool


@dataclass
class Admit(CacheOrder):
    """A row for a prefill. The others reply."""

    number: int


@dataclass
class Unadmit(CacheOrder):
    """Removal of the row behind `rows` others, if it was admitted."""

    rows: int


@dataclass
class Finish(CacheOrder):
    """Removal of a row."""

    row: int


@dataclass
class CopyRow(CacheOrder):
    """A copy of a row's cache, which the next `Keep` may take."""

    row: int


@dataclass
class Reserve(CacheOrder):
    """Capacity for so many further tokens of each row."""

    count: int


@dataclass
class HoldStates(CacheOrder):
    """A copy of the states in front of a verification step."""


@dataclass
class TakeBack(CacheOrder):
    """Removal of the last tokens of each row: so many."""

    counts: list[int]


@dataclass
class Keep(CacheOrder):
    """A cached prefix.

    Attributes:
        number: of the prefill that it belongs to.
        kept: the number of the prefix.
        more: its tokens behind the prompt; None for the prompt's own prefix.
        is_copy: True if its cache is the copy of `CopyRow`.
        held: numbers of the prefixes that are cached then.
    """

    number: int
    kept: int
    more: list[int] | None
    is_copy: bool
    held: list[int]


@dataclass
class End(CacheOrder):
    """No further orders."""


def encode(orders: Iterable[CacheOrder]) -> list[Tensor]:
    """A message with orders: their text, then their tensors."""
    tensors = list[Tensor]()

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_TENSOR: len(tensors)}
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return value

    texts = [
        [type(order).__name__, {field.name: plain(getattr(order, field.name)) for field in fields(order)}]
        for order in orders
    ]
    return [as_bytes(texts), *tensors]


def decode(message: Sequence[Tensor | None]) -> list[CacheOrder]:
    """The orders of a message that `encode` made."""

    def actual(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        number = value.get(_TENSOR)
        if isinstance(number, int):
            return message[number]
        return {name: actual(item) for name, item in value.items()}

    return [
        CacheOrder.kinds[kind](**{name: actual(value) for name, value in values.items()})
        for kind, values in from_bytes(message[0])
    ]
