"""Draws of random numbers for trials, until each branch of eager code had all of its outcomes.

The first draw has numbers about 1. In the others a tensor may have another magnitude: 1e-3 to 1e2, or near a
number that eager code compared values with. Every second one has other layer indices.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..basics.record import current as record_of_code
from ..basics.scoped import having
from ..basics.state import Unsupported
from .branches import Branches, in_words

LEAST, MOST = 4, 40  # draws of a trial
_SMALLEST, _LARGEST = -3.0, 2.0  # exponents of 10


class Void(Exception):
    """Eager code gave NaN or infinity: a draw shows nothing."""


class Draw:
    """One draw.

    Attributes:
        number: of the draw; 0 has numbers about 1.
        bounds: numbers near which magnitudes may lie.
        branches: the outcomes that its numbers had in eager code.
    """

    def __init__(self, number: int, bounds: list[float]) -> None:
        self.number, self.bounds, self.branches = number, bounds, Branches()
        self._chance = torch.Generator().manual_seed(number)

    def magnitude(self) -> float:
        """The magnitude of the next tensor."""
        if self.number == 0 or self._one() < 0.5:
            return 1.0
        if self.bounds and self._one() < 0.5:
            bound = self.bounds[int(self._one() * len(self.bounds))]
            return abs(bound) * (0.5 + 1.5 * self._one())
        return float(10.0 ** (_SMALLEST + (_LARGEST - _SMALLEST) * self._one()))

    def _one(self) -> float:
        return torch.rand(1, generator=self._chance).item()


_current: ContextVar[Draw | None] = ContextVar("moe_mps_draw", default=None)


def current() -> Draw | None:
    """The draw of the trial that runs."""
    return _current.get()


def is_first_kind() -> bool:
    """True in every second draw: trials of two kinds take turns."""
    draw = _current.get()
    return draw is None or draw.number % 2 == 0


def normal(*shape: int) -> Tensor:
    """Normal numbers of the draw's next magnitude."""
    return torch.randn(shape) * magnitude()


def magnitude() -> float:
    draw = _current.get()
    return 1.0 if draw is None else draw.magnitude()


def eager(function: Callable) -> Callable:
    """Eager code, whose reads are recorded, and whose branches the draw records."""

    def run(*args: Any, **options: Any) -> Any:
        draw, record = _current.get(), record_of_code()
        own = function if record is None else functools.partial(record.run, function)
        return own(*args, **options) if draw is None else draw.branches.run(own, *args, **options)

    return run


def require_finite(expected: Tensor) -> None:
    """Raises: Void if a result of eager code within a draw is not finite."""
    if _current.get() is not None and not bool(expected.isfinite().all()):
        raise Void


class Draws:
    """The draws of a trial, and what eager code did with their numbers.

    Args:
        count: of draws; None: until each branch had its outcomes.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count, self._made = count, list[Draw]()

    def __call__(self, compare: Callable[[Draw], bool]) -> bool:
        """True if `compare` holds in each draw, until each branch of eager code had all of its outcomes.

        Raises: Unsupported if a branch never had one of them; the message names it.
        """
        seen, void, missing = Branches(), 0, None
        for number in range(MOST if self._count is None else self._count):
            if number == len(self._made):
                reached = {*seen.bounds}
                self._made.append(Draw(number, sorted(reached)))
            draw = self._made[number]
            # Its numbers are those of the draw, whatever its process has drawn, whose numbers stay.
            with having(_current, draw), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(number)
                try:
                    if not compare(draw):
                        return False
                except Void:
                    void += 1
                    continue
            seen.add(draw.branches)
            missing = next(seen.unreached(), None)
            if missing is None and number + 1 - void >= LEAST:
                return True
        if self._count is not None and void < self._count:
            return True
        raise Unsupported(in_words(*missing) if missing else "eager code gives no finite numbers")


def in_each_draw(compare: Callable[..., Any]) -> Callable[..., bool]:
    """Decorator of a comparison: it then is True if it holds in each draw of a trial."""

    @functools.wraps(compare)
    def shows(*arguments: Any) -> bool:
        return Draws()(lambda draw: bool(compare(*arguments)))

    return shows
