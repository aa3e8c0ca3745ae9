"""File of the step that runs right now: after a hard abort the next process tells where the last one stopped.

A line is written before each library is compiled and each call is made, and given to the system at once: an
abort, of Apple's compiler or driver too, leaves it there. Each process that writes has a file of its own,
which it locks, and removes when it ends.
"""

import atexit
import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .._environment import CHECK
from .machine import COMMAND, cache_folder

try:
    import fcntl
except ImportError:  # not on Windows, where there is no GPU to check
    fcntl = None  # type: ignore[assignment]

_numbers = itertools.count()
_lock = threading.Lock()


class _Open(NamedTuple):
    process: int
    path: Path
    file: int


_open: _Open | None = None


@contextlib.contextmanager
def noted(step: str) -> Iterator[None]:
    """Context that records in the journal what runs inside, which may end the process."""
    number = next(_numbers)
    _write(f"+{number} {' '.join(step.split())}")
    try:
        yield
    finally:
        _write(f"-{number}")


def stopped() -> list[str]:
    """Steps during which other processes crashed; each is reported once."""
    if fcntl is None:
        return []
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home directory
        return [step for path in sorted(cache_folder().glob("journal-*.txt")) for step in _left_in(path)]
    return []


def _left_in(path: Path) -> list[str]:
    """The steps that have not ended; none while the process runs that writes the file. Removes it."""
    if _open is not None and path == _open.path:
        return []
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another process has it
        steps: dict[str, str] = {}
        for line in file:
            number, _, step = line[1:].rstrip("\n").partition(" ")
            if line.startswith("+"):
                steps[number] = step
            else:
                steps.pop(number, None)
        path.unlink()
        return [*steps.values()]
    return []


def _write(line: str) -> None:
    """Write a line, or nothing where that fails: nothing depends on it."""
    with contextlib.suppress(OSError, RuntimeError), _lock:
        os.write(_file(), f"{line}\n".encode())


def _file() -> int:
    """The file of this process; a fork has another one than its parent."""
    global _open
    if _open is None or _open.process != os.getpid():
        if steps := stopped():
            warnings.warn(
                f"torch_moe_mps: the process before stopped in its self-check, {', '.join(steps)}. If nobody "
                f"ended it, `{COMMAND}` writes a report for an issue; {CHECK}=0 checks nothing",
                stacklevel=2,
            )
        path = cache_folder() / f"journal-{os.getpid()}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _open = _Open(os.getpid(), path, file)
        atexit.register(_remove, _open)
    return _open.file


def _remove(opened: _Open) -> None:
    if opened.process == os.getpid():
        opened.path.unlink(missing_ok=True)
