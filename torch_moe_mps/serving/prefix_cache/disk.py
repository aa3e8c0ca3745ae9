"""Prefix cache in a folder: written while the server runs, read back if memory has a shorter prefix.

A prompt is stored as blocks of tokens, named by a hash of all tokens up to their end and of the model: common
prefixes are stored once. Recurrent states, and tokens after the last whole block, are in a separate file.
Files are renamed into place when complete. Name and last position are part of the checksummed content, so
that torn or misnamed files are rejected.
"""

import errno
import hashlib
import json
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..._faults import Mark, fault_of
from ..._text import first_line
from ...models.programs import CachePart, JoinedCache, PrefixState, empty_cache, key_of
from .files import Files, WriterThread, header

log = logging.getLogger(__name__)
BLOCK = 256  # tokens
_PASSES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR)  # the file may be read later


@dataclass
class _Snapshot:
    """A prefix at the time of its insertion, and the iterator over its parts that are not yet copied."""

    ids: Tensor
    state: PrefixState
    key: str
    names: list[str]  # a whole block each
    storages: dict[int, int]  # {address: bytes}
    parts: Iterator[tuple[str, int, CachePart]] = field(default_factory=lambda: iter(()))


class Disk:
    """Disk tier of the prefix cache.

    File I/O runs on threads; everything else runs on the device thread, in parts between its steps.

    Args:
        folder, max_bytes, max_written: of its `Files`.

    Attributes:
        hits, tokens: restored prefixes, and their tokens.

    Raises: OSError, ValueError as `Files`.
    """

    def __init__(self, folder: Path, max_bytes: int, max_written: int | None = None):
        self.files = Files(folder, max_bytes, max_written)
        self.hits = self.tokens = 0
        self._writer = WriterThread(self.files)
        self._pending: deque[_Snapshot] = deque()
        self._copying: tuple[str, int, CachePart, Mark] | None = None
        self._keys: dict[Any, str] = {}
        self._key = "unknown"

    def use(self, model: Any, adapters: Any) -> None:
        """Selects the model and its active adapters for later reads and writes."""
        if adapters not in self._keys:
            text = json.dumps(key_of(model), sort_keys=True)
            self._keys[adapters] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._key = self._keys[adapters]

    # Writing

    @property
    def is_storing(self) -> bool:
        """True if prefixes are queued for the writer."""
        return not self._writer.has_failed and (self._copying is not None or bool(self._pending))

    def note(self, ids: Tensor, state: PrefixState) -> None:
        """Queues a snapshot of a prefix for writing."""
        if self._writer.has_failed or not len(ids) or (copied := state.snapshot(len(ids))) is None:
            return
        snapshot = _Snapshot(ids, copied, self._key, _names(self._key, ids), copied.count_storages())
        snapshot.parts = self._parts(snapshot)
        self._pending = deque(old for old in self._pending if not _begins(ids, old.ids))
        self._pending.append(snapshot)

    def shrink(self, memory: int, in_memory: Mapping[int, int]) -> None:
        """Drops queued prefixes, the oldest first, until memory and queue take at most `memory` bytes.

        Args:
            in_memory: {address: bytes} of the prefixes that stay in memory.
        """
        room = max(0, memory - sum(in_memory.values()))
        while self._pending:
            queued = {place: size for each in self._pending for place, size in each.storages.items()}
            if sum(size for place, size in queued.items() if place not in in_memory) <= room:
                return
            self._pending.popleft()

    def forget(self) -> None:
        """Drops queued prefixes to free their memory."""
        self._pending.clear()

    def store(self, wait: bool = False) -> None:
        """Copies the next part for the writer, unless its queue is full.

        Args:
            wait: blocks until the writer's queue has room.

        Raises: torch.AcceleratorError if the GPU fails; queued prefixes are dropped.
        """
        try:
            self._store(wait)
        except torch.AcceleratorError:
            self._pending.clear()
            self._copying = None
            raise

    def _store(self, wait: bool) -> None:
        """Hands the copied part to the writer, and begins to copy the next; `wait` waits for both."""
        if self._writer.has_failed:
            self._pending.clear()
            self._copying = None
        if self._copying is not None:
            name, end, part, copied = self._copying
            copied.wait()
            if self._writer.is_behind and not wait:
                return
            self._writer.put(name, end, part)
            self._copying = None
        if not self._pending or (self._writer.is_behind and not wait):
            return
        snapshot = self._pending[0]
        try:
            name, end, part = next(snapshot.parts, ("", 0, CachePart({}, {})))
            if not name:
                self._pending.popleft()
                self._writer.touch(snapshot.names)
                return
            self._writer.plan(name)
            copy = part.begun_copy()
            self._copying = name, end, copy, Mark(part.device, commits=True)
        except Exception as error:  # a cache that cannot be cut or written
            if (fault := fault_of(error)) is not None:
                raise fault from None
            self._pending.popleft()
            log.warning("a prefix is not cached in %s: %s", self.files.folder, first_line(error))

    def close(self) -> None:
        """Writes the queued prefixes."""
        try:
            while self.is_storing:
                self.store(wait=True)
        except torch.AcceleratorError as fault:
            log.warning("a prefix is not cached in %s: %s", self.files.folder, first_line(fault))
        self._writer.close()

    def _parts(self, snapshot: _Snapshot) -> Iterator[tuple[str, int, CachePart]]:
        """Yields (name, last position, part) of each part of a prefix that is not on the disk."""
        ids, state = snapshot.ids, snapshot.state
        for number, name in enumerate(snapshot.names if state.has_blocks else ()):
            if not self._writer.has(name):
                end = (number + 1) * BLOCK
                yield name, end, state.block(end - BLOCK, end)
        for end in sorted({*state.states, len(ids)}):
            name = _state_name(snapshot.key, snapshot.names, ids, end)
            if (end in state.states or end % BLOCK) and not self._writer.has(name):
                yield name, end, state.end(end - end % BLOCK, end)

    # Reading

    def find(self, model: Any, ids: Tensor, least: int) -> "Restoring | None":
        """Starts restoring the longest stored prefix of a prompt [T].

        Returns: None if it is not worth reading beside the `least` tokens in memory.
        """
        if self._writer.has_failed:
            return None
        names, empty, there = _names(self._key, ids), PrefixState(empty_cache(model), {}), self.files.names()
        has_blocks, needs_state = empty.has_blocks, empty.has_states
        limit = len(ids) - needs_state  # one token is computed in any case: others can be cut
        whole = next((n for n, name in enumerate(names) if name not in there), len(names))
        start = 0 if needs_state else min(whole * BLOCK, limit // BLOCK * BLOCK)
        longest = min(limit, whole * BLOCK + BLOCK - 1) if has_blocks else limit
        best, last = self._longest_state(names, ids, there, range(start + 1, longest + 1)) or (start, None)
        if best < least + BLOCK // 4:  # so few are computed as quickly
            return None
        blocks = names[: best // BLOCK] if has_blocks else []
        files = [(name, (n + 1) * BLOCK) for n, name in enumerate(blocks)]
        if last is not None:
            files.append((last, best))
        return Restoring(self, empty.joining(best), ids[:best], files, model.device)

    def _longest_state(
        self, names: list[str], ids: Tensor, there: set[str], ends: range
    ) -> tuple[int, str] | None:
        """(end, name) of the longest stored state file of a prompt within `ends`, or None."""
        states = (name for name in there if name.startswith(self._key) and name.endswith(".state"))
        known = {int(name.rpartition("-")[2].removesuffix(".state")) for name in states}
        fitting = ((end, _state_name(self._key, names, ids, end)) for end in known if end in ends)
        return max((pair for pair in fitting if pair[1] in there), default=None)

    def failed(self, name: str, error: Exception) -> None:
        """Logs that a file cannot be used, and removes it unless memory or file handles ran out.

        torch raises RuntimeError for a failed allocation; damaged files raise other errors.
        """
        log.warning("%s is left out: %s", self.files.folder / name, first_line(error))
        if isinstance(error, MemoryError | RuntimeError) or getattr(error, "errno", None) in _PASSES:
            return
        self.files.remove(name)

    def restored(self, tokens: int, names: list[str]) -> None:
        """Updates the counters after a prefix was restored."""
        self.hits += 1
        self.tokens += tokens
        self._writer.touch(names)


class Restoring:
    """Incremental read of a stored prefix, between steps of other sequences.

    Attributes:
        ids, cache: the restored prefix once `step` returns True; `ids` is empty if reading failed.
    """

    def __init__(
        self, disk: Disk, joined: JoinedCache, ids: Tensor, files: list[tuple[str, int]], device: torch.device
    ):
        self._disk, self._joined, self._all, self._files, self._device = disk, joined, ids, files, device
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next, self._left = 0, False
        self.ids = ids[:0]
        threading.Thread(target=self._read, name="prompt", daemon=True).start()

    @property
    def cache(self) -> DynamicCache:
        return self._joined.cache

    def step(self, wait: bool) -> bool:
        """Adds the next part that was read. Returns: True once reading is complete.

        Args:
            wait: blocks until the next part is read.
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
                self._joined.add(got.on_device(self._device), end)
            except Exception as error:  # anything may have been read
                self._disk.failed(name, error)
                self._end(needs_all=PrefixState(self.cache, {}).has_states)
                return True
            self._next += 1
        if self._next == len(self._files):
            self._end(needs_all=False)
            return True
        return False

    def leave(self) -> None:
        """Cancels the read."""
        self._left = True

    def _end(self, needs_all: bool) -> None:
        self._left = True
        self.ids = self._all[: 0 if needs_all else self._joined.tokens]
        if len(self.ids):
            self._disk.restored(len(self.ids), [name for name, _ in self._files])

    def _read(self) -> None:
        for name, end in self._files:
            if self._left:
                return
            try:
                self._ready.put(CachePart.read(self._disk.files.folder / name, header(name, end)))
            except Exception as error:  # anything may have been read
                self._ready.put(error)
                return


def _names(key: str, ids: Tensor) -> list[str]:
    """File name of each whole block of a prompt [T], a hash of all tokens up to its end."""
    names, digest = [], key.encode()
    tokens = ids.to(torch.int64).cpu()
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        data = tokens[start : start + BLOCK].numpy().tobytes()
        digest = hashlib.blake2b(digest + data, digest_size=16).hexdigest().encode()
        names.append(f"{key}/{digest.decode()}.block")
    return names


def _state_name(key: str, names: list[str], ids: Tensor, end: int) -> str:
    """Name of the state file of the first `end` tokens."""
    before = names[end // BLOCK - 1] if end >= BLOCK else key
    data = before.encode() + ids[end - end % BLOCK : end].to(torch.int64).cpu().numpy().tobytes()
    return f"{key}/{hashlib.blake2b(data, digest_size=16).hexdigest()}-{end}.state"


def _begins(ids: Tensor, other: Tensor) -> bool:
    return len(other) <= len(ids) and torch.equal(ids[: len(other)], other)
