"""The file of a model's experts: one contiguous block an expert, which one read brings into memory.

    magic, length of the header, header    JSON: a key of the checkpoint, and the layout of each layer
    checksums                              two uint32 a block: 1 once the block is written, and its CRC-32
    blocks                                 at multiples of ALIGNMENT, layer by layer, expert by expert

A block has the tensors of one expert behind each other. The file is written under another name, whose
checksums tell a later process what is complete, and is renamed once everything is.
"""

import fcntl
import json
import os
import shutil
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..selfcheck.machine import NO_CACHE, was_faster

ALIGNMENT = 1 << 14  # bytes: a page of Apple silicon
_MAGIC = b"moe_mps experts\n"
_LENGTH = struct.Struct("<Q")
_ENTRY = struct.Struct("<II")
_LARGEST_HEADER = 1 << 28


@dataclass(frozen=True)
class Layer:
    """The experts of one layer.

    Attributes:
        name: of the module.
        experts: how many it has.
        tensors: {name: (dtype as torch calls it, shape)} of one expert, in the order of a block.
        turned: the matrices whose rows are columns in the module.
    """

    name: str
    experts: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    turned: Sequence[str] = ()

    @property
    def sizes(self) -> list[int]:
        """Bytes of the tensors of an expert."""
        return [dtype_of(dtype).itemsize * prod(shape) for dtype, shape in self.tensors.values()]

    @property
    def block(self) -> int:
        """Bytes from one block to the next."""
        return _aligned(sum(self.sizes))


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be one of torch, got {name!r}")
    return dtype


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Places:
    """Offsets in a file of these layers."""

    def __init__(self, key: str, layers: Sequence[Layer]):
        text = json.dumps({"key": key, "layers": [[*vars(layer).values()] for layer in layers]})
        self.header = _MAGIC + _LENGTH.pack(len(text.encode())) + text.encode()
        self.checksums = _aligned(len(self.header))
        self.first = [0]  # number of blocks before each layer
        for layer in layers:
            self.first.append(self.first[-1] + layer.experts)
        self.starts = [_aligned(self.checksums + _ENTRY.size * self.first[-1])]
        for layer in layers:
            self.starts.append(self.starts[-1] + layer.experts * layer.block)
        self.size = self.starts[-1]

    def entries(self, layer: int) -> tuple[int, int]:
        """Offset and bytes of a layer's checksums."""
        count = self.first[layer + 1] - self.first[layer]
        return self.checksums + _ENTRY.size * self.first[layer], _ENTRY.size * count


class NewFile:
    """A file that is being written. `written` makes it.

    Attributes:
        left: the numbers of the layers that are not complete.
    """

    def __init__(self, file: int, places: _Places, layers: Sequence[Layer]):
        self._file, self._places, self._layers = file, places, layers
        self.left = [number for number in range(len(layers)) if not self._is_complete(number)]

    def _is_complete(self, number: int) -> bool:
        offset, size = self._places.entries(number)
        stored = os.pread(self._file, size, offset)
        return len(stored) == size and all(complete for complete, _ in _ENTRY.iter_unpack(stored))

    def add(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a layer of tensors [experts, ...] on the CPU.

        Raises: ValueError for tensors of another layout, OSError for a full disk.
        """
        layer = self._layers[number]
        for name, (dtype, shape) in layer.tensors.items():
            expected = (dtype_of(dtype), (layer.experts, *shape))
            if (got := (tensors[name].dtype, tuple(tensors[name].shape))) != expected:
                raise ValueError(f"{layer.name}.{name} must be {expected}, got {got}")
        rows = [tensors[name].detach() for name in layer.tensors]
        entries = []
        for expert in range(layer.experts):
            views = [bytes_of(row[expert].contiguous()) for row in rows]
            entries.append((1, _checksum(views)))
            _write(self._file, views, self._places.starts[number] + expert * layer.block)
        os.fsync(self._file)  # a layer that is called complete is on the disk
        packed = b"".join(_ENTRY.pack(*entry) for entry in entries)
        _write(self._file, [memoryview(packed)], self._places.entries(number)[0])
        self.left.remove(number)


def _locked(unfinished: Path) -> int:
    """An open file that no other process writes. One that does so is awaited, until its file is complete or
    it ends.
    """
    while True:
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"torch_moe_mps: waiting for a process that writes {unfinished}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file), os.stat(unfinished)):
                return file
        except FileNotFoundError:  # it has its name now, or was removed
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


@contextmanager
def written(path: Path, key: str, layers: Sequence[Layer]) -> Iterator[NewFile]:
    """Block that writes the file of a checkpoint's experts; it has its name once the block has added all.

    A process that was killed is resumed. Nothing is left to add where another process has written the file
    meanwhile. After an error of the disk nothing is left of the file.

    Raises: ValueError without space on the disk; OSError.
    """
    places, unfinished = _Places(key, layers), path.with_name(f".{path.name}.unfinished")
    try:
        file = _locked(unfinished)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    complete = False
    try:
        if path.exists():
            yield NewFile(file, places, ())
            return
        if os.pread(file, len(places.header), 0) != places.header:
            os.ftruncate(file, 0)
        needed, free = places.size - os.fstat(file).st_blocks * 512, shutil.disk_usage(path.parent).free
        if needed > free:
            sizes = f"{needed / 1e9:.2f} GB of free space, got {free / 1e9:.2f} GB"
            raise ValueError(f"{path.parent} must have {sizes}")
        print(f"torch_moe_mps: writing {path}, {places.size / 1e9:.2f} GB, once", file=sys.stderr)
        new = None
        try:
            _write(file, [memoryview(places.header)], 0)
            yield (new := NewFile(file, places, layers))
            os.ftruncate(file, places.size)
            os.fsync(file)
            unfinished.rename(path)
        except OSError as error:
            raise OSError(f"{path} cannot be written: {error.strerror or error}") from None
        except BaseException:
            complete = new is not None and len(new.left) < len(layers)
            raise
        complete = True
    finally:
        try:
            if not complete:
                unfinished.unlink(missing_ok=True)
        finally:
            os.close(file)


class ExpertsFile:
    """A complete file of experts, open for reading by any number of threads and processes.

    Attributes:
        path, key, layers: as it was written.

    Raises: ValueError for a file that is truncated or none of experts, or of another key; OSError.
    """

    def __init__(self, path: Path, key: str | None = None):
        self.path = path
        self._file = opened(path)
        weakref.finalize(self, os.close, self._file)  # once no read that is late has it, either
        self.key, self.layers = self._read_header()
        if key is not None and self.key != key:
            raise ValueError(f"{path} has the experts of another checkpoint or format: remove it")
        self._places = _Places(self.key, self.layers)
        if (size := os.fstat(self._file).st_size) != self._places.size:
            raise ValueError(f"{path} must have {self._places.size:,} bytes, got {size:,}")
        count = _ENTRY.size * self._places.first[-1]
        self._checksums = [sum for _, sum in _ENTRY.iter_unpack(self._pread(count, self._places.checksums))]
        self._unchecked = bytearray(b"\1") * len(self._checksums)

    def _pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise ValueError(f"{self.path} is truncated")
        return data

    def _read_header(self) -> tuple[str, list[Layer]]:
        try:
            start = self._pread(len(_MAGIC) + _LENGTH.size, 0)
            (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
            if not start.startswith(_MAGIC) or length > _LARGEST_HEADER:
                raise ValueError
            header = json.loads(self._pread(length, len(start)))
            layers = [
                Layer(name, experts, {n: (d, tuple(s)) for n, (d, s) in tensors.items()}, tuple(turned))
                for name, experts, tensors, turned in header["layers"]
            ]
            return header["key"], layers
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path} is truncated or not a file of experts") from None

    def read(self, layer: int, expert: int, views: Sequence[memoryview], begin: int = 0) -> None:
        """Reads a part of an expert's block, from the byte `begin` on, into views of bytes.

        Raises: ValueError where the file ends before; OSError.
        """
        offset = self._places.starts[layer] + expert * self.layers[layer].block + begin
        if not fill(self._file, views, offset):
            raise ValueError(f"{self._of(layer, expert)} is truncated")

    def check(self, layer: int, expert: int, views: Sequence[memoryview]) -> None:
        """Compares an expert that was read as a whole with its checksum, the first time.

        Raises: ValueError for another one.
        """
        number = self._places.first[layer] + expert
        if self._unchecked[number]:
            if _checksum(views) != self._checksums[number]:
                raise ValueError(f"{self._of(layer, expert)} has another checksum than it was written with")
            self._unchecked[number] = 0

    def _of(self, layer: int, expert: int) -> str:
        return f"{self.path}: expert {expert} of {self.layers[layer].name}"


def opened(path: str | Path) -> int:
    """A file for reading; past the page cache, if that was measured to be faster here."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if was_faster(NO_CACHE):
        cache(file, False)
    return file


def cache(file: int, is_on: bool) -> None:
    """Switches the page cache for a file on or off, on macOS."""
    if (f_nocache := getattr(fcntl, "F_NOCACHE", None)) is not None:
        fcntl.fcntl(file, f_nocache, int(not is_on))


def fill(file: int, views: Sequence[memoryview], offset: int) -> bool:
    """Reads into views of bytes. Returns: False where the file ends before. Raises: OSError."""
    rest = [view for view in views if len(view)]
    while rest:
        count = os.preadv(file, rest, offset)
        if count == 0:
            return False
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]
    return True


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(views: Sequence[memoryview]) -> int:
    result = 0
    for view in views:
        result = zlib.crc32(view, result)
    return result


def _write(file: int, views: Sequence[memoryview], offset: int) -> None:
    for view in views:
        while len(view):
            count = os.pwrite(file, view, offset)
            view, offset = view[count:], offset + count
