"""Ctrl-C: it ends an answer before it ends a command, and the process while modules are imported."""

import os
import signal
import threading
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


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside the block, Ctrl-C and SIGTERM end the process: an import that they interrupt raises anything."""
    main = threading.current_thread() is threading.main_thread()
    signals = {signal.SIGINT: _interrupted, signal.SIGTERM: _ended} if main else {}
    handlers = {n: each for n, each in signals.items() if signal.getsignal(n) is not signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"\ntorch-moe-mps: interrupted\n")
    _ended(number, frame)


def _ended(number: int, frame: object) -> None:
    os._exit(128 + number)
