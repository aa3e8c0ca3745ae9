"""The file of a model's experts: one contiguous block an expert, which one read brings into memory.

    magic, length of the header, header    JSON: a key, the number of sources, and the layout of each layer
    digests                                SHA-256 of each source: a file that the experts were read from
    stamps                                 size, time and inode of each source when it was last digested
    checksums                              two uint32 a block: 1 once the block is written, and its CRC-32
    blocks                                 at multiples of ALIGNMENT, layer by layer, expert by expert

Header, digests and stamps end with their CRC-32. A source whose stamp differs is digested again. A block has
the tensors of one expert behind each other. The file is written under another name, whose checksums tell a
later process what is complete, and is renamed once everything is.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import resource
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
from typing import NamedTuple

import torch
from torch import Tensor

from ..selfcheck.machine import NO_CACHE, was_faster

ALIGNMENT = 1 << 14  # bytes: a page of Apple silicon
OTHER_FILES = 1024  # most open files of a process besides those of experts
_MAGIC = b"moe_mps experts\n"
_LENGTH = struct.Struct("<Q")
_ENTRY = struct.Struct("<II")
_STAMP = struct.Struct("<QqQ")
_DIGEST = hashlib.sha256().digest_size
_CRC = struct.Struct("<I")
_LARGEST_HEADER = 1 << 28


@dataclass(frozen=True)
class Layer:
    """The experts of one layer.

    Attributes:
        name: of the module.
        experts: how many it has.
        tensors: {name: (dtype as torch calls it, shape)} of one expert, in the order of a block.
        transposed: the matrices whose rows are columns in the module.
    """

    name: str
    experts: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    transposed: Sequence[str] = ()

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
    """Offsets in a file of these layers, which were read from so many sources."""

    def __init__(self, key: str, layers: Sequence[Layer], sources: int):
        about = {"key": key, "sources": sources, "layers": [[*vars(layer).values()] for layer in layers]}
        text = json.dumps(about).encode()
        self.header = _MAGIC + _LENGTH.pack(len(text)) + _sealed(text)
        self.digests = len(self.header)
        self.stamps = self.digests + _DIGEST * sources + _CRC.size
        self.checksums = _aligned(self.stamps + _STAMP.size * sources + _CRC.size)
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


class Places(NamedTuple):
    """Where the experts of a layer lie in files.

    Attributes:
        dtypes: of the layer's tensors in the files.
        rows: [number of a tensor, number of a file, offset, bytes to the next expert, experts].
        checksums: of the experts; none for files without them.
        blocks: of matrices that are converted as they are read: ggml's type, and the numbers of a
            `StoredBlocks` of csrc/slots/disk.h.
    """

    dtypes: list[torch.dtype]
    rows: list[list[int]]
    checksums: Sequence[int] = ()
    blocks: Sequence[tuple[str, list[int]]] = ()


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


def _sealed(data: bytes) -> bytes:
    return data + _CRC.pack(zlib.crc32(data))


def stamp_of(source: str | os.PathLike) -> bytes:
    """Size, time of modification and inode of a file, which change with its content.

    Other times change with its permissions, too, and a digest of a checkpoint takes minutes.
    """
    about = os.stat(source)
    return _STAMP.pack(about.st_size, about.st_mtime_ns, about.st_ino)


def _parts(data: bytes, size: int) -> Iterator[bytes]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))


def _digest_of(source: str | os.PathLike) -> bytes:
    with open(source, "rb", buffering=0) as file:
        cache(file.fileno(), False)
        return hashlib.file_digest(file, "sha256").digest()


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
def written(path: Path, key: str, layers: Sequence[Layer], sources: Sequence[str] = ()) -> Iterator[NewFile]:
    """Block that writes the file of a checkpoint's experts; it has its name once the block has added all.

    A process that was killed is resumed. Nothing is left to add where another process has written the file
    meanwhile. After an error of the disk nothing is left of the file.

    Args:
        sources: the files that the experts are read from.

    Raises: ValueError without space on the disk, and for a source that changes meanwhile; OSError.
    """
    places, unfinished = _Places(key, layers, len(sources)), path.with_name(f".{path.name}.unfinished")
    stamps = _sealed(b"".join(map(stamp_of, sources)))
    try:
        file = _locked(unfinished)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    complete = False
    try:
        if path.exists():
            yield NewFile(file, places, ())
            return
        begun = ((places.header, 0), (stamps, places.stamps))
        if any(os.pread(file, len(data), offset) != data for data, offset in begun):
            os.ftruncate(file, 0)
        needed, free = places.size - os.fstat(file).st_blocks * 512, shutil.disk_usage(path.parent).free
        if needed > free:
            sizes = f"{needed / 1e9:.2f} GB of free space, got {free / 1e9:.2f} GB"
            raise ValueError(f"{path.parent} must have {sizes}")
        print(f"torch_moe_mps: writing {path}, {places.size / 1e9:.2f} GB, once", file=sys.stderr)
        new = None
        try:
            for data, offset in begun:
                _write(file, [memoryview(data)], offset)
            yield (new := NewFile(file, places, layers))
            os.ftruncate(file, places.size)
            digests = _sealed(b"".join(map(_digest_of, sources)))
            if _sealed(b"".join(map(stamp_of, sources))) != stamps:
                raise ValueError(f"the files that {path} is written from have changed meanwhile: try again")
            _write(file, [memoryview(digests)], places.digests)
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

    Args:
        key, sources: that it must have been written with; a key of None is any.

    Attributes:
        path, key, layers: as it was written.
        opened: {name: open file}.
        fingerprint: tells its experts from those of other files.

    Raises: ValueError for a file that is damaged or none of experts, or of another key or other sources;
        OSError.
    """

    def __init__(self, path: Path, key: str | None = None, sources: Sequence[str] = ()):
        self.path = path
        if path.is_dir():
            raise ValueError(f"{path} must be a file of experts, got a folder")
        self._file = opened(path)
        self.opened = {str(path): self._file}
        weakref.finalize(self, os.close, self._file)
        self.key, self.layers, count = self._read_header()
        self._places = _Places(self.key, self.layers, count)
        if key is not None and (self.key != key or count != len(sources)):
            raise self._of_another()
        if (size := os.fstat(self._file).st_size) != self._places.size:
            raise ValueError(f"{path} must have {self._places.size:,} bytes, got {size:,}: remove it")
        digests = self._unsealed(_DIGEST * count, self._places.digests)
        if digests is None:
            raise self._damaged()
        if key is not None:
            self._compare(sources, digests)
        self.fingerprint = hashlib.sha256(self.key.encode() + digests).hexdigest()
        count = _ENTRY.size * self._places.first[-1]
        self._checksums = [sum for _, sum in _ENTRY.iter_unpack(self._pread(count, self._places.checksums))]

    def _pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise ValueError(f"{self.path} is truncated")
        return data

    def _unsealed(self, size: int, offset: int) -> bytes | None:
        """Bytes with their checksum behind them; None for another checksum."""
        data = os.pread(self._file, size + _CRC.size, offset)
        return data[:size] if _sealed(data[:size]) == data else None

    def _damaged(self) -> ValueError:
        return ValueError(f"{self.path} is damaged or not a file of experts: remove it")

    def _of_another(self) -> ValueError:
        return ValueError(f"{self.path} has the experts of another checkpoint or format: remove it")

    def _read_header(self) -> tuple[str, list[Layer], int]:
        """(key of the file, its layers, number of its sources), from an undamaged header."""
        start = os.pread(self._file, len(_MAGIC) + _LENGTH.size, 0)
        if len(start) < len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
            raise self._damaged()
        (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
        text = None if length > _LARGEST_HEADER else self._unsealed(length, len(start))
        if text is None:
            raise self._damaged()
        header = json.loads(text)
        layers = [
            Layer(name, experts, {n: (d, tuple(s)) for n, (d, s) in tensors.items()}, tuple(transposed))
            for name, experts, tensors, transposed in header["layers"]
        ]
        return header["key"], layers, header["sources"]

    def _compare(self, sources: Sequence[str], digests: bytes) -> None:
        """Compares the sources with those that the file was written from, by content where stamps differ.

        Raises: ValueError for another source.
        """
        stored = self._unsealed(_STAMP.size * len(sources), self._places.stamps)
        stamps = [*map(stamp_of, sources)]
        before = [None] * len(stamps) if stored is None else [*_parts(stored, _STAMP.size)]
        changed = [number for number, stamp in enumerate(stamps) if stamp != before[number]]
        if not changed:
            return
        print(f"torch_moe_mps: comparing files with those of {self.path}: {len(changed)}", file=sys.stderr)
        for number in changed:
            if _digest_of(sources[number]) != [*_parts(digests, _DIGEST)][number]:
                raise self._of_another()
        with contextlib.suppress(OSError):  # a disk that cannot be written: the next process compares again
            file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write(file, [memoryview(_sealed(b"".join(stamps)))], self._places.stamps)
            finally:
                os.close(file)

    def places(self) -> Iterator[Places]:
        """Yields where each layer lies."""
        for number, layer in enumerate(self.layers):
            rows, offset = [], self._places.starts[number]
            for tensor, size in enumerate(layer.sizes):
                rows.append([tensor, 0, offset, layer.block, layer.experts])
                offset += size
            first = self._places.first[number]
            dtypes = [dtype_of(dtype) for dtype, _ in layer.tensors.values()]
            yield Places(dtypes, rows, self._checksums[first : first + layer.experts])

    def read(self, layer: int, expert: int, views: Sequence[memoryview]) -> None:
        """Reads an expert into views of bytes, and compares it with its checksum.

        Raises: ValueError where the file ends before, and for another checksum; OSError.
        """
        if not fill(self._file, views, self._places.starts[layer] + expert * self.layers[layer].block):
            raise ValueError(f"{self._of(layer, expert)} is truncated")
        if _checksum(views) != self._checksums[self._places.first[layer] + expert]:
            raise ValueError(f"{self._of(layer, expert)} has another checksum than it was written with")

    def _of(self, layer: int, expert: int) -> str:
        return f"{self.path}: expert {expert} of {self.layers[layer].name}"


def allow_open_files(count: int) -> None:
    """Raises the limit of files that this process may have open, if it is below these and OTHER_FILES.

    macOS begins with 256, and a checkpoint may have as many. Where the system allows fewer, whoever opens one
    too many says so.
    """
    most, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if allowed != resource.RLIM_INFINITY:
        wanted = min(wanted, allowed)
    if most != resource.RLIM_INFINITY and most < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))


def opened(path: str | Path) -> int:
    """A file for reading; past the page cache, if that was measured to be faster here."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if not uses_page_cache():
        cache(file, False)
    return file


def uses_page_cache() -> bool:
    """True unless reads of experts past the page cache were measured to be faster here."""
    return not was_faster(NO_CACHE)


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
