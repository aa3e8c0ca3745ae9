"""Files of cached prefixes: a folder of bounded size, and the thread that writes its files."""

import errno
import logging
import os
import queue
import re
import stat
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..._text import first_line
from ...models.programs import CachePart

log = logging.getLogger(__name__)
_MARKER = "torch_moe_mps prompts"
_WRITTEN = re.compile(rb"([0-9]+) ([0-9]+)\n")  # in the marker: a day, and the bytes that were written on it
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FILE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}(\.block|-[0-9]+\.state)")
_AT_ONCE = 4  # parts that wait for the disk: a slow one delays nothing, and later parts wait in memory


class Files:
    """Files in a folder with a capacity in bytes and LRU eviction. Thread-safe.

    If the disk is full, files are evicted and `max_bytes` shrinks to their size.

    Args:
        folder: created if missing.
        max_bytes: the capacity.
        max_written: bytes that are written a day (UTC), over restarts; None for any number. An SSD wears.

    Raises: OSError, ValueError for a folder with other content, not writable, or in use by another process.
    """

    def __init__(self, folder: Path, max_bytes: int, max_written: int | None = None):
        self.folder, self.max_bytes, self.max_written = folder, max_bytes, max_written
        self._lock, self._held = threading.Lock(), _owned(folder)
        self._sizes = _found(folder)  # {name: bytes}, unused longest first
        self._refused = -1  # the last day that a line was logged for

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._sizes

    def names(self) -> set[str]:
        with self._lock:
            return {*self._sizes}

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, evicting others as needed, unless the day's bytes are written.

        Raises: OSError if that makes no room.
        """
        count = self._counted(len(data))
        if count is None:
            return
        self._make_room(len(data))
        while True:
            try:
                self._write_count(count)
                self._write_file(self.folder / name, data)
                break
            except OSError as error:
                if error.errno not in _FULL or not self._sizes:
                    raise
                self.max_bytes = self.nbytes
                self._make_room(len(data))
                gigabytes = self.max_bytes / 1e9
                log.warning("the disk is full: %s takes at most %.2f GB from now on", self.folder, gigabytes)
        with self._lock:
            self._sizes[name] = len(data)

    def _counted(self, nbytes: int) -> bytes | None:
        """Count of the day with so many bytes more; None, and a line in the log, if that is too many."""
        if self.max_written is None:
            return b""
        today = int(time.time() // 86400)
        stored = _WRITTEN.fullmatch(os.pread(self._held, 64, 0))
        day, written = map(int, stored.groups()) if stored else (today, 0)
        total = nbytes + (written if day == today else 0)
        if total > self.max_written:
            if self._refused != today:
                self._refused = today
                bound = f"--prompt-writes allows {self.max_written / 1e9:g} GB a day"
                log.warning("no prefixes are written to %s until tomorrow (UTC): %s", self.folder, bound)
            return None
        return f"{today} {total}\n".encode()

    def _write_count(self, count: bytes) -> None:
        """Writes the day's count into the marker. Raises: OSError, also for a full disk."""
        if count:
            os.ftruncate(self._held, os.pwrite(self._held, count, 0))

    def _write_file(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(".new")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        unfinished.replace(path)

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            total = sum(self._sizes.values())
            while self._sizes and total + nbytes > self.max_bytes:
                name, size = self._sizes.popitem(last=False)
                total -= size
                (self.folder / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError:  # the folder is gone
            return

    def touch(self, names: list[str]) -> list[str]:
        """Marks files as recently used. Returns: the existing ones, in reverse order.

        A prompt's last block is thus evicted before its first.
        """
        with self._lock:
            used = [name for name in reversed(names) if name in self._sizes]
            for name in used:
                self._sizes.move_to_end(name)
        return used

    def renew(self, names: list[str]) -> None:
        """Sets modification times in this order, so that the LRU order survives a restart."""
        now = time.time_ns()
        for number, name in enumerate(names):
            path = self.folder / name
            if path.exists():
                os.utime(path, ns=(now + number, now + number))

    def close(self) -> None:
        """Releases the folder's lock."""
        os.close(self._held)


class _End:
    """Sentinel that ends the writer's queue."""


class WriterThread:
    """Thread that writes files.

    Attributes:
        has_failed: True after an error, which is reported on stderr; nothing is written from then on.
    """

    def __init__(self, files: Files):
        self._files, self.has_failed = files, False
        self._queued = set[str]()
        self._queue: queue.Queue[Any] = queue.Queue(_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        return self._queue.full()

    def has(self, name: str) -> bool:
        """True if a file exists or is queued."""
        return name in self._queued or name in self._files  # in this order: it is there before it leaves

    def plan(self, name: str) -> None:
        """Marks a file as queued before its content is ready."""
        self._queued.add(name)

    def put(self, name: str, end: int, part: CachePart) -> None:
        """Queues a part for writing; blocks while the queue is full."""
        self._queue.put((name, end, part))

    def touch(self, names: list[str]) -> None:
        """Marks files as recently used."""
        used = self._files.touch(names)
        if not self.is_behind:
            self._queue.put(used)

    def close(self) -> None:
        """Finishes queued work and joins the thread."""
        self._queue.put(_End)
        self._thread.join()
        self._files.close()

    def _run(self) -> None:
        """Writes queued parts until the queue ends. After an error, parts are dropped."""
        while (work := self._queue.get()) is not _End:
            if self.has_failed:
                continue
            try:
                if isinstance(work, list):
                    self._files.renew(work)
                else:
                    self._write(*work)
            except Exception as error:  # a full disk, a folder that is gone
                self.has_failed = True
                folder, reason = self._files.folder, first_line(error)
                line = f"torch-moe-mps: no prefixes are cached in {folder} any more: {reason}"
                print(line, file=sys.stderr)

    def _write(self, name: str, end: int, part: CachePart) -> None:
        self._files.write(name, part.to_bytes(header(name, end)))
        self._queued.discard(name)


def header(name: str, end: int) -> str:
    """Identity stored in a file: its name (hash of model, adapters, dtype and prompt) and last position."""
    return f"{name} {end}"


def _owned(folder: Path) -> int:
    """Creates and locks a cache folder for this process. Returns: the descriptor that holds the lock.

    Raises: OSError, ValueError.
    """
    import fcntl

    marker = folder / _MARKER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not marker.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} has other files in it")
        descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise OSError(f"{folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        why = "another process uses it" if isinstance(error, BlockingIOError) else error.strerror
        raise OSError(f"{folder} cannot be used: {why}") from None
    return descriptor


def _found(folder: Path) -> OrderedDict[str, int]:
    """{name: bytes} of the files in a folder, least recently used first. Removes unfinished ones."""
    found = []
    for path in folder.glob("*/*"):
        name, about = f"{path.parent.name}/{path.name}", path.lstat()
        if path.suffix == ".new":
            path.unlink(missing_ok=True)
        elif stat.S_ISREG(about.st_mode) and _FILE.fullmatch(name):
            found.append((about.st_mtime_ns, name, about.st_size))
    return OrderedDict((name, size) for _, name, size in sorted(found))
