"""Cached prefixes in a folder: written while the server runs, read back where memory has less of them.

A prompt is written as blocks of tokens, whose names follow from all tokens up to their end and from what
computed them: what prompts begin with in common is there once. States that fit one prefix alone, and tokens
behind the last block, are in a file of their own. Each file is whole before it has its name, and has the name
and its last position inside, under the checksum: one that is torn, or has another file's name, is not used.
"""

import errno
import hashlib
import json
import logging
import os
import queue
import re
import stat
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from ..._text import first_line
from ...transformers.caches.in_layers import is_in_layers
from ...transformers.caches.parts import (
    Joined,
    Part,
    begun_copy,
    block,
    classes_of,
    device_of,
    octets_of,
    on_device,
    read_part,
)
from ...transformers.caches.prompt_cache import fits_one_prefix, kept_states, key_of, new_cache
from ...transformers.caches.state import LayerState, copy_of_cache, copy_of_layer, storages_of

log = logging.getLogger(__name__)
BLOCK = 256  # tokens
_MARKER, _VERSION = "torch_moe_mps prompts", "1"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FILE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}(\.block|-[0-9]+\.state)")
_PASSES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR)  # the file may be read later
_AT_ONCE = 4  # parts that wait for the disk: a slow one delays nothing, and later parts wait in memory


class _Wait:
    """The end of the writer's work."""


@dataclass
class _Snapshot:
    """A prompt as it was when it was kept, and the parts of it that are still to be copied."""

    ids: Tensor
    cache: DynamicCache
    states: dict[int, dict[int, dict[str, Any]]]
    key: str
    names: list[str]  # a whole block each
    storages: dict[int, int]  # {address: bytes}
    parts: Iterator[tuple[str, int, Part]] = field(default_factory=lambda: iter(()))


class Disk:
    """A folder of prompts, of at most so many bytes: those unused longest go first.

    Where the disk is full, they go, too, and `most` becomes their remaining size.

    All but the writing and reading of files is done by the thread of the device, in parts between its steps.

    Args:
        folder: made where it is not there.
        most: bytes.

    Attributes:
        hits, tokens, read_bytes, seconds: prompts that were read, their tokens, bytes, and the time it took.
        written_bytes: of all files.

    Raises: OSError, ValueError with one line for a folder that is not ours, is of another version, cannot be
        written, or is another server's.
    """

    def __init__(self, folder: Path, most: int):
        self.folder, self.most = folder, most
        self.hits = self.tokens = self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0
        self._lock, self._fault = threading.Lock(), False
        self._held = _owned(folder)
        self._files = _found(folder)  # {name: bytes}, unused longest first
        self._queued = set[str]()
        self._pending: deque[_Snapshot] = deque()
        self._copying: tuple[str, int, Part, dict[int, Any], Any] | None = None
        self._keys: dict[Any, str] = {}
        self._key = "unknown"
        self._queue: queue.Queue[Any] = queue.Queue(_AT_ONCE)
        self._writer = threading.Thread(target=self._write, name="disk", daemon=True)
        self._writer.start()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._files.values())

    def use(self, model: Any, adapters: Any) -> None:
        """Prompts are of this model from now on, with the current adapters."""
        if adapters not in self._keys:
            text = json.dumps(key_of(model), sort_keys=True)
            self._keys[adapters] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._key = self._keys[adapters]

    # Writing

    @property
    def is_storing(self) -> bool:
        """Whether there is something to copy for the writer."""
        return not self._fault and (self._copying is not None or bool(self._pending))

    def note(self, ids: Tensor, cache: Any, states: dict[int, dict[int, dict[str, Any]]]) -> None:
        """Queues a prompt for writing, in its current state."""
        if self._fault or not is_in_layers(cache) or not len(ids):
            return
        copied = copy_of_cache(cache, [copy_of_layer(layer) for layer in cache.layers])
        ends = {position: state for position, state in states.items() if position < len(ids)}
        if own := kept_states(cache):
            ends[len(ids)] = own
        storages = storages_of(tensors_of(copied, ends))
        snapshot = _Snapshot(ids, copied, ends, self._key, _names(self._key, ids), storages)
        snapshot.parts = self._parts(snapshot)
        self._pending = deque(old for old in self._pending if not _begins(ids, old.ids))
        self._pending.append(snapshot)

    def shrink(self, memory: int, held: Mapping[int, int]) -> None:
        """Drops unwritten prefixes, the oldest first, until all take at most so many bytes.

        Args:
            held: {address: bytes} of prompts that stay, unwritten ones among them.
        """
        room = max(0, memory - sum(held.values()))
        while self._pending:
            own = {place: size for each in self._pending for place, size in each.storages.items()}
            if sum(size for place, size in own.items() if place not in held) <= room:
                return
            self._pending.popleft()

    def forget(self) -> None:
        """Drops unwritten prefixes, whose memory is needed."""
        self._pending.clear()

    def store(self, wait: bool = False) -> None:
        """Copies a part for the writer, unless that is behind.

        Args:
            wait: for the writer.
        """
        if self._fault:
            self._pending.clear()
            self._copying = None
        if self._copying is not None:
            name, end, part, classes, event = self._copying
            if event is not None:
                event.synchronize()
            if self._queue.full() and not wait:
                return
            self._queue.put((name, end, part, classes))
            self._copying = None
        if not self._pending or (self._queue.full() and not wait):
            return
        snapshot = self._pending[0]
        try:
            name, end, part = next(snapshot.parts, ("", 0, {}))
            if not name:
                self._pending.popleft()
                self.touch(snapshot.names)
                return
            self._queued.add(name)
            copy = begun_copy(part)
            event, device = None, device_of(part)
            if device.type != "cpu":
                event = torch.Event(device=device, blocking=True)
                event.record()
            self._copying = name, end, copy, classes_of(snapshot.cache), event
        except Exception as error:  # a cache that cannot be cut or written
            self._pending.popleft()
            log.warning("a prompt is not kept in %s: %s", self.folder, first_line(error))

    def close(self) -> None:
        """Writes the queued prefixes."""
        while self.is_storing:
            self.store(wait=True)
        self._queue.put(_Wait)
        self._writer.join()
        os.close(self._held)

    def _parts(self, snapshot: _Snapshot) -> Iterator[tuple[str, int, Part]]:
        """(name, last position, part) of the parts of a prompt that no file has."""
        ids, cache = snapshot.ids, snapshot.cache
        has_blocks = not all(map(fits_one_prefix, cache.layers))
        for number, name in enumerate(snapshot.names if has_blocks else ()):
            if not self._is_there(name):
                end = (number + 1) * BLOCK
                yield name, end, block(cache, end - BLOCK, end)
        for end in sorted({*snapshot.states, len(ids)}):
            name = _state_name(snapshot.key, snapshot.names, ids, end)
            if (end in snapshot.states or end % BLOCK) and not self._is_there(name):
                yield name, end, {**block(cache, end - end % BLOCK, end), **snapshot.states.get(end, {})}

    def _is_there(self, name: str) -> bool:
        with self._lock:
            return name in self._files or name in self._queued

    def _write(self) -> None:
        """The thread of the writer."""
        while (work := self._queue.get()) is not _Wait:
            if self._fault:
                continue
            try:
                if isinstance(work, list):
                    self._renew(work)
                else:
                    self._write_part(*work)
            except Exception as error:  # a full disk, a folder that is gone
                self._fault = True
                line = f"torch-moe-mps: prompts are not kept in {self.folder} any more: {first_line(error)}"
                print(line, file=sys.stderr)

    def _write_part(self, name: str, end: int, part: Part, classes: dict[int, Any]) -> None:
        octets = octets_of(part, classes, _header(name, end))
        self._make_room(len(octets))
        while True:
            try:
                self._write_file(self.folder / name, octets)
                break
            except OSError as error:
                if error.errno not in _FULL or not self._files:
                    raise
                self.most = self.nbytes
                self._make_room(len(octets))
                gigabytes = self.most / 1e9
                log.warning("the disk is full: %s takes at most %.2f GB from now on", self.folder, gigabytes)
        with self._lock:
            self._files[name] = len(octets)
            self._queued.discard(name)
        self.written_bytes += len(octets)

    def _write_file(self, path: Path, octets: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_suffix(".new")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            try:
                file.write(octets)
                file.flush()
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        unfinished.replace(path)

    def _make_room(self, octets: int) -> None:
        with self._lock:
            held = sum(self._files.values())
            while self._files and held + octets > self.most:
                name, size = self._files.popitem(last=False)
                held -= size
                (self.folder / name).unlink(missing_ok=True)

    def touch(self, names: list[str]) -> None:
        """Files that were used: a prompt's beginning goes after its end."""
        with self._lock:
            used = [name for name in reversed(names) if name in self._files]
            for name in used:
                self._files.move_to_end(name)
        if not self._queue.full():
            self._queue.put(used)

    def _renew(self, names: list[str]) -> None:
        now = time.time_ns()
        for number, name in enumerate(names):
            path = self.folder / name
            if path.exists():
                os.utime(path, ns=(now + number, now + number))

    # Reading

    def find(self, model: Any, ids: Tensor, least: int) -> "Restoring | None":
        """The longest beginning of a prompt [T] that is there; None if `least` tokens are about as many."""
        if self._fault:
            return None
        names, cache = _names(self._key, ids), new_cache(model)
        has_blocks = not all(map(fits_one_prefix, cache.layers)) or not cache.layers
        needs_state = any(map(fits_one_prefix, cache.layers))
        with self._lock:
            whole = next((n for n, name in enumerate(names) if name not in self._files), len(names))
            there = {name for name in self._files if name.startswith(self._key) and name.endswith(".state")}
        ends = {int(name.rpartition("-")[2].removesuffix(".state")) for name in there}
        most = len(ids) - needs_state  # one token is computed in any case: others can be cut
        best, last = (0, None) if needs_state else (min(whole * BLOCK, most // BLOCK * BLOCK), None)
        for end in ends:
            if best < end <= most and (not has_blocks or end // BLOCK <= whole):
                name = _state_name(self._key, names, ids, end)
                if name in there:
                    best, last = end, name
        if best < least + BLOCK // 4:  # so few are computed as quickly
            return None
        files = (
            [(name, (n + 1) * BLOCK) for n, name in enumerate(names[: best // BLOCK])] if has_blocks else []
        )
        if last is not None:
            files.append((last, best))
        return Restoring(self, Joined(cache, best), ids[:best], files, model.device)

    def failed(self, name: str, error: Exception) -> None:
        """Logs that a part cannot be used, and removes its file unless memory or file handles were short.

        `RuntimeError` is torch's, for an allocation; a damaged file raises others.
        """
        log.warning("%s is left out: %s", self.folder / name, first_line(error))
        if isinstance(error, MemoryError | RuntimeError) or getattr(error, "errno", None) in _PASSES:
            return
        with self._lock:
            self._files.pop(name, None)
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError:  # the folder is gone
            return


class Restoring:
    """A prompt that is read, part by part, while others are answered.

    Attributes:
        ids, cache: the stored prefix, once `step` says so; `ids` is empty where none is.
    """

    def __init__(
        self, disk: Disk, joined: Joined, ids: Tensor, files: list[tuple[str, int]], device: torch.device
    ):
        self._disk, self._joined, self._all, self._files, self._device = disk, joined, ids, files, device
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begun, self._next, self._left = time.monotonic(), 0, False
        self.ids = ids[:0]
        threading.Thread(target=self._read, name="prompt", daemon=True).start()

    @property
    def cache(self) -> DynamicCache:
        return self._joined.cache

    def step(self, wait: bool) -> bool:
        """Takes the parts that are read. Returns: whether the prompt is there.

        Args:
            wait: for the next part.
        """
        if self._next < len(self._files):
            try:
                got = self._ready.get(block=wait)
            except queue.Empty:
                return False
            name, end = self._files[self._next]
            try:
                if isinstance(got, Exception):
                    raise got
                part, classes = got
                self._joined.add(on_device(part, self._device), classes, end)
            except Exception as error:  # anything may have been read
                self._disk.failed(name, error)
                self._end(needs_all=any(map(fits_one_prefix, self.cache.layers)))
                return True
            self._next += 1
        if self._next == len(self._files):
            self._end(needs_all=False)
            return True
        return False

    def leave(self) -> None:
        """Ends the reading, whose client has left."""
        self._left = True

    def _end(self, needs_all: bool) -> None:
        self._left = True
        self.ids = self._all[: 0 if needs_all else self._joined.tokens]
        if len(self.ids):
            self._disk.hits += 1
            self._disk.tokens += len(self.ids)
            self._disk.seconds += time.monotonic() - self._begun
            self._disk.touch([name for name, _ in self._files])

    def _read(self) -> None:
        for name, end in self._files:
            if self._left:
                return
            path = self._disk.folder / name
            try:
                self._ready.put(read_part(path, _header(name, end)))
                self._disk.read_bytes += path.stat().st_size
            except Exception as error:  # anything may have been read
                self._ready.put(error)
                return


def _header(name: str, end: int) -> str:
    """Identity of a file: its key (model, adapters, dtype), prompt, kind, and its last position."""
    return f"{name} {end}"


def _names(key: str, ids: Tensor) -> list[str]:
    """The file of each whole block of a prompt [T], named by all tokens up to its end."""
    names, digest = [], key.encode()
    tokens = ids.to(torch.int64).cpu()
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        octets = tokens[start : start + BLOCK].numpy().tobytes()
        digest = hashlib.blake2b(digest + octets, digest_size=16).hexdigest().encode()
        names.append(f"{key}/{digest.decode()}.block")
    return names


def _state_name(key: str, names: list[str], ids: Tensor, end: int) -> str:
    """The file behind the last whole block of the first `end` tokens."""
    before = names[end // BLOCK - 1] if end >= BLOCK else key
    octets = before.encode() + ids[end - end % BLOCK : end].to(torch.int64).cpu().numpy().tobytes()
    return f"{key}/{hashlib.blake2b(octets, digest_size=16).hexdigest()}-{end}.state"


def tensors_of(cache: DynamicCache, states: dict[int, dict[int, dict[str, Any]]]) -> list[Tensor]:
    """All tensors of a prompt's cache, and of its states for shorter prefixes."""
    held = [tensor for layer in cache.layers for tensor in LayerState(layer).tensors().values()]
    return held + [state for state in tree_leaves(states) if isinstance(state, Tensor)]


def _begins(ids: Tensor, other: Tensor) -> bool:
    return len(other) <= len(ids) and torch.equal(ids[: len(other)], other)


def _owned(folder: Path) -> int:
    """Makes a folder ours, for this process alone. Returns: the open file that says so.

    Raises: OSError, ValueError with one line.
    """
    import fcntl

    marker = folder / _MARKER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not marker.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} has other files in it")
        held = os.open(marker, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise OSError(f"{folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        why = "another server uses it" if isinstance(error, BlockingIOError) else error.strerror
        raise OSError(f"{folder} cannot be used: {why}") from None
    version = os.pread(held, 64, 0).decode(errors="replace")
    if not version:
        os.pwrite(held, _VERSION.encode(), 0)
    elif version != _VERSION:
        os.close(held)
        raise ValueError(f"{folder} is of another version ({first_line(version)})")
    return held


def _found(folder: Path) -> OrderedDict[str, int]:
    """{name: bytes} of the files in a folder, unused longest first. Unfinished ones are removed."""
    found = []
    for path in folder.glob("*/*"):
        name, about = f"{path.parent.name}/{path.name}", path.lstat()
        if path.suffix == ".new":
            path.unlink(missing_ok=True)
        elif stat.S_ISREG(about.st_mode) and _FILE.fullmatch(name):
            found.append((about.st_mtime_ns, name, about.st_size))
    return OrderedDict((name, size) for _, name, size in sorted(found))
