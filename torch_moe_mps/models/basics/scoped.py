"""Values of context variables and a look at calls inside of a block, and caches of a bounded size."""

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def having(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Inside the block, the variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


class _Collector:
    """Python's garbage collector, which pauses while any thread needs it to.

    Attributes:
        pauses: how many blocks of `paused` are open.
        ran: whether it ran before the first of them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pauses, self.ran = 0, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self.lock:
            if self.pauses == 0:
                self.ran = gc.isenabled()
                gc.disable()
            self.pauses += 1
        try:
            yield
        finally:
            with self.lock:
                self.pauses -= 1
                if self.pauses == 0 and self.ran:
                    gc.enable()


_collector = _Collector()


@contextlib.contextmanager
def shown_calls(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Inside the block, `look` is shown the calls of Python, as by `sys.setprofile`.

    The garbage collector is paused meanwhile: what it runs, as finalizers and the callbacks of other
    libraries, comes at a chance moment and is none of the code that is looked at.
    """
    with _collector.paused():
        before = sys.getprofile()
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


class Bounded(dict[Any, Any]):
    """A dictionary that forgets all it has before it has more than `max_entries`."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.max_entries and key not in self:
            self.clear()
        super().__setitem__(key, value)
