"""Policy of capture: the third call of a kind is captured, with symbols for the numbers that vary."""

import sys
import threading
import warnings
from collections.abc import Callable

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..._environment import CAPTURE, choice
from ..._text import first_line
from ..basics.scoped import Bounded
from ..graphs.tracing import LeftAlone, NotCapturable, symbols_end
from .exchange import ExchangeError
from .reading import Reading

TOO_FEW = "no kind of call for a few tokens was repeated three times"
_CALLS_BEFORE = 2  # the third call of a kind is captured
_MAX_CAPTURES = 16  # for each kind of calls: the guards of some never hold for long
_MAX_PINNED = 4
_MAX_KINDS = 64
_LONGEST_REST = 4096  # calls after which a capture that failed is tried again
# Errors of a recording where Python asks for a value that only the GPU knows.
_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class Kind:
    """Statistics of calls that differ in numbers and tensors alone."""

    def __init__(self) -> None:
        self.calls = 0  # since the last capture
        self.captures = 0
        self.pinned = 0  # captures that hold for one value of a number
        self.fixes_rows = False  # the model runs other operators for each number of rows
        self.left_alone: str | None = None  # why
        self.numbers: list[int] = []
        self.varied: dict[int, int] = {}  # {position of a number that changes: its value before}

    def note(self, numbers: list[int]) -> None:
        """Records the numbers of a call and which of them changed since the previous call."""
        for position, (before, now) in enumerate(zip(self.numbers, numbers, strict=False)):
            if before != now:
                self.varied[position] = before
        self.numbers = numbers

    def note_program(self, is_pinned: bool, fixes_rows: bool) -> None:
        """Raises: NotCapturable if too many programs of this kind hold for one length alone."""
        self.fixes_rows |= fixes_rows
        self.pinned += is_pinned  # once a window is full, it is so for all tokens
        if self.pinned > _MAX_PINNED:
            raise NotCapturable("it rests on one length of the context")

    def symbols(self, reading: Reading) -> tuple[dict[int, int], list[int], list[int]]:
        """{position of a number: its symbol}, what the symbols are now, and what they are at least.

        Numbers that were equal in both of two calls share a symbol, if both are sizes, places in buffers or
        neither. A size below 2 is never one: calls of one kind have the same sizes of 0 and 1. The rows of a
        batch may be others in the next call, before they ever were.
        """
        rows = set() if self.fixes_rows else reading.rows
        assumed = rows if rows.isdisjoint(self.varied) else set()
        assumed |= reading.starts if rows else set()  # they move on when a row leaves that was the longest
        changing = {position: reading.numbers[position] for position in reading.growing | assumed}
        groups: dict[tuple[int, int, bool, bool, bool], int] = {}
        symbol: dict[int, int] = {}
        for position, before in sorted((changing | self.varied).items()):
            now = reading.numbers[position]
            is_size, is_row = position in reading.sizes, position in reading.rows
            if (is_size and now < 2) or (is_row and self.fixes_rows):
                continue
            group = before, now, is_row, position in reading.starts, is_size
            symbol[position] = groups.setdefault(group, len(groups))
        return symbol, [now for _, now, *_ in groups], [2 if is_size else 0 for *_, is_size in groups]


class Policy:
    """Chooses the calls of a model that are captured.

    Attributes:
        failure: why the last capture failed; None if it did not.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._reads_masks = False
        self._lock = threading.Lock()
        self._kinds = Bounded(_MAX_KINDS)
        self._rest, self._failures = 0, 0
        self._has_warned = False

    def forget(self) -> None:
        """Clears the counts of calls, but not of failures."""
        self._kinds = Bounded(_MAX_KINDS)

    def offer(
        self,
        read: Callable[[bool], Reading],
        capture: Callable[[Reading, Kind], None],
        has_programs: bool,
    ) -> str | bool:
        """Counts a call, and captures it if it is the third of its kind.

        Args:
            read: takes the call apart; with the values of masks where a recording has read them.
            has_programs: calls of other kinds are captured.

        Returns: whether it is captured, or why it cannot be.
        """
        if self._rest > 0 and self.failure is not None:
            self._rest -= 1
            return self.failure
        if not self._lock.acquire(blocking=False):
            return False  # another thread captures
        kind = None
        try:
            reading = read(self._reads_masks)
            kind = self._kind_to_capture(reading)
            if kind is None:
                return False
            with symbols_end():
                try:
                    capture(reading, kind)
                finally:
                    self._reads_masks |= reading.reads_mask
        except ExchangeError:
            raise
        except LeftAlone as alone:
            if kind is not None:
                kind.left_alone = str(alone)
            return str(alone)
        except NotCapturable as unsupported:
            return self._failed(str(unsupported), True, has_programs)
        except _OF_VALUES as error:
            reason = f"it asks for values that only the GPU knows ({first_line(error)})"
            return self._failed(reason, True, has_programs)
        except UnsupportedOperatorException as error:
            return self._failed(f"{error} has no meta function", True, has_programs)
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {first_line(error)}", False, has_programs)
        finally:
            self._lock.release()
        self._failures, self.failure = 0, None
        return True

    def _kind_to_capture(self, reading: Reading) -> Kind | None:
        """Counts a call. Returns: its kind if this call is to be captured, else None."""
        kind: Kind | None = self._kinds.get(reading.key)
        if kind is None:
            kind = self._kinds[reading.key] = Kind()
        kind.note(reading.numbers)
        if kind.left_alone is not None:
            raise LeftAlone(kind.left_alone)
        kind.calls += 1
        if kind.calls <= _CALLS_BEFORE:
            return None
        if kind.captures >= _MAX_CAPTURES:
            raise NotCapturable(f"calls of one kind were captured {_MAX_CAPTURES} times, and differ again")
        kind.calls, kind.captures = 0, kind.captures + 1
        return kind

    def _failed(self, reason: str, is_expected: bool, has_programs: bool) -> str:
        """Reason why a call was not captured; warns once, if it happens again or is not expected.

        The next calls are not offered to `capture`; each failure quadruples their number.
        """
        self.failure = reason
        self._failures += 1
        self._rest = min(4**self._failures, _LONGEST_REST)
        if not (is_expected and (has_programs or self._failures < 2)):
            self._warn_once(f"a token could not be captured and runs module by module: {reason}")
        return reason

    def refuse(self, reason: str) -> str:
        """Lets no further call be captured, as a program was wrong. Returns: the reason."""
        self.failure, self._rest = reason, sys.maxsize
        self._warn_once(f"a captured token failed, tokens run module by module from now on: {reason}")
        return reason

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"torch_moe_mps: {text}", stacklevel=8)


def wanted_capture(capture: bool | None) -> bool | None:
    """Resolves `capture`: True always captures, False never does, None follows MOE_MPS_CAPTURE."""
    switch = choice(CAPTURE)
    if capture is not None and type(capture) is not bool:
        raise ValueError(f"moe_mps::accelerate: capture must be True, False or None, got {capture!r}")
    return {"0": False, "1": True}.get(switch) if capture is None else capture
