"""Ctrl-C, which ends an answer before it ends a command."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_ctrl_c(first: Callable[[], None] | None = None) -> Iterator[None]:
    """Ctrl-C calls `first`, and raises KeyboardInterrupt from the second time on, or without `first` at once.

    In an event loop, Python would cancel the whole chat at the next step that waits.
    """
    left = [] if first is None else [first]

    def handle(number: int, frame: object) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
