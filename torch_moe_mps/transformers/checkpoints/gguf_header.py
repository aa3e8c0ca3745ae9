"""The header of a GGUF file, taken apart once: lists of texts, such as a vocabulary, where somebody asks.

transformers' first reader takes every value apart through numpy, and reads a file for each of its questions.
"""

import copy
import functools
import mmap
import os
import struct
from collections.abc import Callable, Container, Iterator
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

_VERSIONS = (2, 3)
# The numbers of the format's types of values: those of one size, and the two others.
_SIZED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
_reading = Lock()


class Header:
    """What a file says in front of its tensors.

    Attributes:
        metadata: {key: value}; of an array of texts the count, as in transformers' second reader.
        types: {key: the number of its type, and of an array's elements}.
        tensors: (name, shape, number of the type, offset) of each.
        end: the byte behind it.
    """

    def __init__(self, path: str):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.types: dict[str, list[int]] = {}
        self._places: dict[str, int] = {}  # of arrays of texts
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
            if version not in _VERSIONS:
                raise ValueError(f"it is of version {version}")
            place = 24
            for _ in range(keys):
                place = self._read_key(data, place)
            self.tensors, self.end = _tensors(data, tensors, place)

    def _read_key(self, data: mmap.mmap, place: int) -> int:
        key, place = _text(data, place)
        (kind,) = struct.unpack_from("<I", data, place)
        self.types[key], place = [kind], place + 4
        if kind == _TEXT:
            self.metadata[key], place = _text(data, place)
            return place
        if kind != _ARRAY:
            form = f"<{_SIZED[kind]}"
            (self.metadata[key],) = struct.unpack_from(form, data, place)
            return place + struct.calcsize(form)
        element, count = struct.unpack_from("<IQ", data, place)
        self.types[key], place = [kind, element], place + 12
        if element != _TEXT:
            form = f"<{count}{_SIZED[element]}"
            self.metadata[key] = [*struct.unpack_from(form, data, place)]
            return place + struct.calcsize(form)
        self.metadata[key], self._places[key] = count, place
        for _ in range(count):
            place += 8 + _LENGTH(data, place)[0]
        return place

    def texts(self, key: str) -> list[str]:
        """The elements of an array of texts."""
        texts, place = [], self._places[key]
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for _ in range(self.metadata[key]):
                text, place = _text(data, place)
                texts.append(text)
        return texts

    def with_texts(self, keys: Container[str]) -> dict[str, Any]:
        """The metadata, with those arrays of texts."""
        return copy.deepcopy(self.metadata) | {key: self.texts(key) for key in self._places if key in keys}


def _text(data: mmap.mmap, place: int) -> tuple[str, int]:
    (length,) = _LENGTH(data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError(f"a text ends at byte {end} of {len(data)}")
    return data[place + 8 : end].decode(), end


def _tensors(
    data: mmap.mmap, count: int, place: int
) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    tensors = []
    for _ in range(count):
        name, place = _text(data, place)
        (dimensions,) = struct.unpack_from("<I", data, place)
        shape = struct.unpack_from(f"<{dimensions}Q", data, place + 4)
        place += 4 + 8 * dimensions
        kind, offset = struct.unpack_from("<IQ", data, place)
        place += 12
        tensors.append((name, shape[::-1], kind, offset))
    return tensors, place


def header_of(path: str) -> Header:
    """The header of a file; it is read again where the file has changed.

    Raises: what reading a damaged file raises, of struct, of mmap and of Python.
    """
    about = os.stat(path)
    return _header(os.path.realpath(path), about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _header(path: str, size: int, time: int) -> Header:
    return Header(path)


def read_metadata(gguf_path: str, string_arrays: Container[str] = ()) -> tuple[dict, tuple[str, ...]]:
    """In place of transformers' function: a file's metadata and the names of its tensors."""
    header = header_of(gguf_path)
    return header.with_texts(string_arrays), tuple(name for name, *_ in header.tensors)


def reading_once(load: Callable) -> Callable:
    """transformers' first loader, which reads of a header what a config is made of; with tensors as it is."""

    @functools.wraps(load)
    def load_once(gguf_checkpoint_path: str, return_tensors: bool = False, *others: Any, **named: Any) -> Any:
        if return_tensors:
            return load(gguf_checkpoint_path, return_tensors, *others, **named)
        header = header_of(gguf_checkpoint_path)
        if not hasattr(header, "parsed"):
            vars(header)["parsed"] = _parsed(load, gguf_checkpoint_path, header)
        return copy.deepcopy(vars(header)["parsed"])

    return load_once


def _parsed(load: Callable, path: str, header: Header) -> dict[str, Any]:
    import gguf

    own = gguf.GGUFReader
    fields = dict(_fields(header))
    reader = SimpleNamespace(
        fields=fields, tensors=[SimpleNamespace(name=name) for name, *_ in header.tensors]
    )

    def read(asked: Any, *others: Any, **named: Any) -> Any:
        return reader if asked == path else own(asked, *others, **named)

    with _reading, mock.patch.object(gguf, "GGUFReader", read):
        parsed: dict[str, Any] = load(path)
    config, tokens = parsed["config"], header.metadata.get("tokenizer.ggml.tokens")
    if config.get("vocab_size") == 0 and tokens:  # it was counted
        config["vocab_size"] = tokens
    return parsed


def _fields(header: Header) -> Iterator[tuple[str, Any]]:
    """The values as the package gguf has them, in parts; arrays of a tokenizer are empty."""
    for key, value in header.metadata.items():
        kinds = header.types[key]
        parts: list[Any] = [np.array([len(key)]), key.encode(), np.array([kinds[0]])]
        if kinds[0] == _TEXT:
            parts += [np.array([len(value)])]
            values = [value.encode()]
        elif kinds[0] != _ARRAY:
            values = [[value]]
        else:
            parts += [np.array([kinds[1]])]
            is_left_out = key.startswith("tokenizer.")
            texts = kinds[1] == _TEXT and not is_left_out
            values = (
                []
                if is_left_out
                else [text.encode() if texts else [text] for text in (header.texts(key) if texts else value)]
            )
            parts += [np.array([len(values)])]
        first = len(parts)
        data = [*range(first, first + len(values))]
        yield key, SimpleNamespace(parts=parts + values, data=data, types=kinds)
