"""Metadata and the table of tensors at the begin of a GGUF file; no length is read before it is checked."""

import os
import struct
from typing import Any

import numpy as np

_VERSIONS = (2, 3)
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9  # types of values that have a length
_MOST_DIMENSIONS = 4  # ggml's
# Limits of lengths, which may be wrong and yet inside of a large file: of a name by the format, of a text by
# ggml, and more values of an array than a vocabulary has merges.
_LONGEST_NAME, _LONGEST_TEXT, _LONGEST_ARRAY = (1 << 16) - 1, 1 << 30, 1 << 24
# Bytes of metadata without a name: its length, a type, a value; and of a tensor: the length, the number of
# dimensions, one of them, a type, the offset.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32
TensorEntry = tuple[str, tuple[int, ...], int, int]  # name, shape, number of the type, offset


class _Bytes:
    """The bytes of a file, of which `place` were read."""

    def __init__(self, data: memoryview):
        self._data, self.place = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def _begin(self, size: int, what: str) -> int:
        """Begin of the next bytes, which are passed. Raises: ValueError if the file has not as many."""
        begin, end = self.place, self.place + size
        if end > len(self._data):
            expected = f"end by byte {len(self._data)}, the last one of the file"
            raise ValueError(f"{what} must {expected}, got {size} bytes from byte {begin} on")
        self.place = end
        return begin

    def raw(self, size: int, what: str) -> bytes:
        """The next bytes."""
        begin = self._begin(size, what)
        return bytes(self._data[begin : begin + size])

    def numbers(self, codes: str, what: str) -> tuple[Any, ...]:
        """Numbers by the codes of `struct`, as "IQ" or "3f"."""
        codes = f"<{codes}"
        return struct.unpack_from(codes, self._data, self._begin(struct.calcsize(codes), what))

    def array(self, count: int, code: str, what: str) -> list[Any]:
        """Numbers of one code."""
        begin = self._begin(count * struct.calcsize(f"<{code}"), what)
        return [*struct.unpack_from(f"<{count}{code}", self._data, begin)]

    def number(self, code: str, what: str) -> Any:
        """One number."""
        return self.numbers(code, what)[0]

    def length(self, most: int, what: str) -> int:
        """A number of bytes or values, at most so many."""
        found: int = self.number("Q", what)
        if found > most:
            raise ValueError(f"the length of {what} must be at most {most}, got {found}")
        return found

    def text(self, what: str, longest: int = _LONGEST_TEXT) -> str:
        """A text. Raises: ValueError for one that is not in UTF-8."""
        found = self.raw(self.length(longest, what), what)
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{what} must be in UTF-8, got {found[error.start : error.start + 4]!r}"
            ) from None

    def pass_texts(self, count: int, what: str) -> None:
        """Passes texts, each of which has a length of eight bytes in front of it."""
        length_at, data, end = struct.Struct("<Q").unpack_from, self._data, self.place
        last = len(data) - 8
        for _ in range(count):
            end += 8 + (length_at(data, end)[0] if end <= last else 0)
        self._begin(end - self.place, what)


def parsed(path: str, is_first: bool = True) -> tuple[dict[str, Any], list[TensorEntry], int]:
    """Metadata of a file, its tensors, and the byte behind them. Of an array of texts it is the count.

    Args:
        is_first: whether the file is the first part, which alone has metadata of the model.

    Raises: ValueError for a file that is no GGUF, or is damaged.
    """
    is_empty = not os.path.getsize(path)  # numpy maps no file without bytes
    mapped: Any = b"" if is_empty else np.memmap(path, mode="r", dtype=np.uint8)
    file = _Bytes(memoryview(mapped))
    magic = file.raw(min(4, len(file)), "the file")
    if magic != b"GGUF":
        raise ValueError(f"the file must begin with b'GGUF', got {magic!r}")
    version = file.number("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        got = f"version {swapped} of a big-endian file" if swapped in _VERSIONS else version
        raise ValueError(f"the version of GGUF must be {_VERSIONS[0]} or {_VERSIONS[1]}, got {got}")
    tensors, entries = file.numbers("QQ", "the numbers of tensors and of metadata")
    if tensors * _LEAST_TENSOR + entries * _LEAST_ENTRY > len(file) - file.place:
        expected = f"as many as fit in {len(file)} bytes"
        raise ValueError(
            f"tensors and metadata must be {expected}, got {tensors} tensors and {entries} entries"
        )
    metadata = _metadata(file, entries)
    if is_first:
        architecture = metadata.get("general.architecture", "no such key")
        if not isinstance(architecture, str) or architecture == "no such key":
            raise ValueError(f"general.architecture must be a text in the metadata, got {architecture}")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, got {alignment!r}")
    return metadata, _tensors(file, tensors), file.place


def _metadata(file: _Bytes, entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(entries):
        key = file.text(f"the name of metadata {number + 1} of {entries}", _LONGEST_NAME)
        if key in metadata:
            raise ValueError(f"{key} must be in the metadata once, got it twice")
        metadata[key] = _value(file, file.number("I", f"the type of {key}"), key)
    return metadata


def _value(file: _Bytes, kind: int, key: str) -> Any:
    """A value of the metadata."""
    if kind in _CODES:
        return file.number(_CODES[kind], key)
    if kind == _TEXT:
        return file.text(key)
    if kind != _ARRAY:
        raise ValueError(f"{key} must be of a type of values from 0 to 12, got {kind}")
    kind, count = file.number("I", key), file.length(_LONGEST_ARRAY, key)
    if kind in _CODES:
        return file.array(count, _CODES[kind], key)
    if kind != _TEXT:
        raise ValueError(f"{key} must be an array of numbers or texts, got one of values of type {kind}")
    file.pass_texts(count, key)
    return count


def _tensors(file: _Bytes, count: int) -> list[TensorEntry]:
    result, names = [], set[str]()
    for number in range(count):
        name = file.text(f"the name of tensor {number + 1} of {count}", _LONGEST_NAME)
        if not name:
            raise ValueError(f"tensor {number + 1} of {count} must have a name, got none")
        if name in names:
            raise ValueError(f"{name} must be among the tensors once, got it twice")
        names.add(name)
        dimensions = file.number("I", name)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} must have 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
        *shape, kind, offset = file.numbers(f"{dimensions}QIQ", name)
        result.append((name, tuple(reversed(shape)), kind, offset))
    return result
